"""Jobs: submit, claim, finish, cancel, sweep. Every change of a status goes through move().

    queued ──────▶ running ──────▶ succeeded | failed | cancelled | expired
       ▲  └────────────┼─────────▶ failed | cancelled | expired
       └───────────────┘ handed back, or the owner was lost

Rows are locked in the order of their ids, by a statement of its own before they are changed: a statement that waits
for a lock would otherwise number its event by an old snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session, undefer
from sqlalchemy.orm.attributes import set_committed_value

from app import db, limits, settlements, tables, webhooks
from app.errors import Conflict, KeyReused, NotFound, QueueFull
from app.events import Event
from app.ids import new_id
from app.tables import Job
from app.tiers import POLICIES, Tier


class Status(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL


DEADLINE_EXCEEDED = {"code": "deadline_exceeded", "message": "The job's deadline passed before it ended"}
"""The error of a job that expired."""
TERMINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.EXPIRED})

TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.RUNNING, Status.FAILED, Status.CANCELLED, Status.EXPIRED}),
    Status.RUNNING: TERMINAL | {Status.QUEUED},
    Status.SUCCEEDED: frozenset(),
    Status.FAILED: frozenset(),
    Status.CANCELLED: frozenset(),
    Status.EXPIRED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as it was accepted: checked, rendered and tokenized."""

    tier: Tier
    model: str
    model_revision: str
    prompt_ids: tuple[int, ...]
    sampling: Mapping[str, Any]
    """The fields of engine.request.Sampling, the seed included."""
    deadline_s: float
    """Seconds from the submission until the job expires."""
    metadata: Mapping[str, str]
    webhook_url: str | None = None
    batch_id: str | None = None
    row_number: int | None = None
    custom_id: str | None = None

    @property
    def most_tokens(self) -> int:
        """What the job may use, prompt and output together."""
        return len(self.prompt_ids) + int(self.sampling["max_tokens"])


@dataclass(frozen=True, slots=True)
class Idempotency:
    """The client's Idempotency-Key and the fingerprint of the body that came with it."""

    key: str
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this worker now runs, and all that its engine needs."""

    job_id: str
    tenant_id: str
    tier: Tier
    attempt: int
    last_event: int
    """The number of the event that announced the attempt."""
    prompt_ids: tuple[int, ...]
    resumed_ids: tuple[int, ...]
    """Tokens that earlier attempts persisted."""
    sampling: Mapping[str, Any]
    deadline_s: float
    """Seconds from the claim until the job expires."""
    weight: float
    """The tenant's share beside others of its tier."""
    counter: float
    """What the tenant had been served, in virtual tokens over its weight, as the job was dispatched."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an attempt, as the worker that ran it saw it."""

    job_id: str
    attempt: int
    status: Status
    finish_reason: str | None = None
    token_ids: tuple[int, ...] = ()
    """Generated since the last persisted event, without text of their own."""
    error: Mapping[str, str] | None = None


# ---- move: the only writer of a status


def move(session: Session, jobs: Sequence[Job], to: Status, *, reason: str | None = None) -> list[Event]:
    """Move locked jobs to a status, each with its next event; at a terminal one also with its settlement and its
    webhook's delivery.

    Callers set the facts of the move (owner, attempt, finish_reason, error) on the rows before. Returns the events,
    to be announced after the commit. Raises AssertionError for a transition that the table does not allow.
    """
    if not jobs:
        return []
    logs = _logs(session, [job.id for job in jobs], with_output=to.is_terminal)
    moved: list[Event] = []
    for job in jobs:
        log = logs[job.id]
        assert to in TRANSITIONS[Status(job.status)], f"{job.id}: {job.status} → {to}"
        job.status = to.value
        if to is not Status.RUNNING:
            job.owner = None
        if to is Status.RUNNING and job.started_at is None:
            job.started_at = log.read_at
        if to.is_terminal:
            job.finished_at = log.read_at
            job.output_text, job.completion_tokens = log.output_text, log.completion_tokens
        event = Event(job.id, log.last_number + 1, to.value, _facts(job, reason))
        session.add(tables.Event(job_id=job.id, number=event.number, kind=event.kind, data=event.data))
        moved.append(event)
        if to.is_terminal and job.webhook_url is not None:
            session.add(webhooks.delivery_of(job, log.read_at))
        if to.is_terminal:
            session.add(settlements.settlement_of(job))
    session.flush()
    return moved


def _facts(job: Job, reason: str | None) -> dict[str, Any]:
    """What the event of a move says."""
    match Status(job.status):
        case Status.QUEUED:
            return {"status": job.status} | ({"reason": reason} if reason else {})
        case Status.RUNNING:
            return {"status": job.status, "attempt": job.attempt}
    return {
        "status": job.status,
        "finish_reason": job.finish_reason,
        "usage": settlements.usage_of(job),
        "error": job.error,
    }


@dataclass(frozen=True, slots=True)
class _Log:
    """A job's events, summed up."""

    read_at: datetime
    """By the database's clock."""
    last_number: int
    output_text: str
    """The texts, joined: the result is what was shown, by construction."""
    completion_tokens: int


_LOGS = text(
    """
    select id, clock_timestamp() as read_at, coalesce(max(number), 0) as last_number,
        coalesce(string_agg(text, ''::bytea order by number) filter (where :with_output), ''::bytea) as output_text,
        coalesce(sum(cardinality(token_ids)), 0) as completion_tokens
    from unnest(cast(:ids as text[])) as asked (id) left join events on events.job_id = asked.id
    group by id
    """
)


def _logs(session: Session, job_ids: Collection[str], *, with_output: bool = True) -> dict[str, _Log]:
    """The log of each job; without its output's text, if that is not wanted. To write, lock the jobs' rows before."""
    if not job_ids:
        return {}
    rows = session.execute(_LOGS, {"ids": list(job_ids), "with_output": with_output})
    return {
        row.id: _Log(row.read_at, row.last_number, bytes(row.output_text).decode(), int(row.completion_tokens))
        for row in rows
    }


def _lock(
    session: Session, *conditions: ColumnElement[bool], skip_locked: bool = False, limit: int | None = None
) -> list[Job]:
    return list(
        session.scalars(
            select(Job)
            .where(*conditions)
            .order_by(Job.id)
            .limit(limit)
            .with_for_update(skip_locked=skip_locked)
            .execution_options(populate_existing=True)
        )
    )


def lock(session: Session, job_ids: Collection[str]) -> None:
    """Lock jobs ahead of several writes to them, so that the order of ids holds over all of these together."""
    session.execute(select(Job.id).where(Job.id.in_(job_ids)).order_by(Job.id).with_for_update())


# ---- submit and read


def submit(
    session: Session,
    tenant_id: str,
    submission: Submission,
    *,
    max_queued: int,
    idempotency: Idempotency | None = None,
) -> tuple[Job, list[Event], bool]:
    """Write a job in state queued. Returns it, its events to announce, and whether it is new.

    The same Idempotency-Key with the same body returns the job that it made. Raises KeyReused for another body,
    Conflict when that job was deleted since, QueueFull when the tenant has max_queued jobs of the tier in line,
    QuotaExceeded when its tokens of today do not suffice for the most that the job may use.
    """
    job_id = new_id("job")
    if idempotency is not None and not _remember(session, tenant_id, idempotency, job_id):
        # Somebody used the key before, or at the same moment and has committed since: his job is the one. Nothing of
        # ours was written, and the next statement of a READ COMMITTED transaction sees what he wrote.
        return _remembered(session, tenant_id, idempotency), [], False
    moment = _admitted_at(session, tenant_id, submission.tier, max_queued)
    is_reserved = limits.reserve(session, tenant_id, settlements.day_of(moment), submission.most_tokens)
    job = _new_job(job_id, tenant_id, submission, moment, is_reserved=is_reserved)
    session.add(job)
    session.flush()
    return job, [_first_event(session, job)], True


def submit_rows(session: Session, tenant_id: str, rows: Sequence[Submission]) -> list[Event]:
    """Write the jobs of a batch's rows, in state queued. Raises QuotaExceeded when together they may use too much."""
    moment = db.now(session)
    most_tokens = sum(row.most_tokens for row in rows)
    is_reserved = bool(rows) and limits.reserve(session, tenant_id, settlements.day_of(moment), most_tokens)
    jobs = [_new_job(new_id("job"), tenant_id, row, moment, is_reserved=is_reserved) for row in rows]
    session.add_all(jobs)
    session.flush()
    return [_first_event(session, job) for job in jobs]


def reject_row(
    session: Session,
    tenant_id: str,
    *,
    batch: tables.Batch,
    row_number: int,
    custom_id: str | None,
    tier: Tier,
    model: str,
    model_revision: str,
    error: Mapping[str, str],
) -> list[Event]:
    """Write a row that cannot run as a job that failed, so that the batch's counts add up from one table."""
    submission = Submission(
        tier=tier,
        model=model,
        model_revision=model_revision,
        prompt_ids=(),
        sampling={},
        deadline_s=(batch.expires_at - db.now(session)).total_seconds(),
        metadata={},
        batch_id=batch.id,
        row_number=row_number,
        custom_id=custom_id,
    )
    job = _new_job(new_id("job"), tenant_id, submission, db.now(session))
    session.add(job)
    session.flush()
    job.error = dict(error)
    first = _first_event(session, job)
    session.flush()  # move() numbers its event by what is written
    return [first, *move(session, [job], Status.FAILED)]


def _new_job(
    job_id: str, tenant_id: str, submission: Submission, moment: datetime, *, is_reserved: bool = False
) -> Job:
    return Job(
        id=job_id,
        tenant_id=tenant_id,
        tier=submission.tier.value,
        model=submission.model,
        model_revision=submission.model_revision,
        status=Status.QUEUED.value,
        prompt_ids=list(submission.prompt_ids),
        prompt_tokens=len(submission.prompt_ids),
        sampling=dict(submission.sampling),
        job_metadata=dict(submission.metadata),
        webhook_url=submission.webhook_url,
        created_at=moment,
        deadline_at=moment + timedelta(seconds=submission.deadline_s),
        attempt=0,
        deaths=0,
        tokens_at_death=0,
        handed_back=False,
        counter=0.0,
        reserved_tokens=submission.most_tokens if is_reserved else 0,
        completion_tokens=0,
        batch_id=submission.batch_id,
        row_number=submission.row_number,
        custom_id=submission.custom_id,
    )


def _first_event(session: Session, job: Job) -> Event:
    event = Event(job.id, 1, Status.QUEUED.value, _facts(job, None))
    session.add(tables.Event(job_id=job.id, number=1, kind=event.kind, data=event.data))
    return event


def _admitted_at(session: Session, tenant_id: str, tier: Tier, max_queued: int) -> datetime:
    """The database's time, if the tenant may have one more job of the tier in line. Raises QueueFull."""
    in_line = (
        select(Job.id)
        .where(Job.tenant_id == tenant_id, Job.tier == tier.value, Job.status == "queued", Job.batch_id.is_(None))
        .limit(max_queued)
        .subquery()
    )
    waiting = select(func.count()).select_from(in_line).scalar_subquery()
    row = session.execute(select(tables.NOW.label("now"), waiting.label("waiting"))).one()
    if row.waiting >= max_queued:
        raise QueueFull
    moment: datetime = row.now
    return moment


def _remembered(session: Session, tenant_id: str, idempotency: Idempotency) -> Job:
    """The job that the key is bound to."""
    record = session.get_one(tables.IdempotencyRecord, (tenant_id, idempotency.key))
    if record.fingerprint != idempotency.fingerprint:
        raise KeyReused(param="Idempotency-Key")
    try:
        return find(session, tenant_id, record.job_id)
    except NotFound:
        raise Conflict(
            f"This Idempotency-Key made job '{record.job_id}', which was deleted", param="Idempotency-Key"
        ) from None


def _remember(session: Session, tenant_id: str, idempotency: Idempotency, job_id: str) -> bool:
    """Bind the key to the job. Waits for a concurrent holder of the key; False if he committed first."""
    inserted = session.execute(
        insert(tables.IdempotencyRecord)
        .values(tenant_id=tenant_id, key=idempotency.key, fingerprint=idempotency.fingerprint, job_id=job_id)
        .on_conflict_do_nothing()
        .returning(tables.IdempotencyRecord.job_id)
    )
    return inserted.first() is not None


def find(session: Session, tenant_id: str, job_id: str, *, with_output: bool = True) -> Job:
    """The tenant's job. Raises NotFound; somebody else's job looks the same as none."""
    query = select(Job).where(Job.id == job_id, Job.tenant_id == tenant_id)
    if with_output:
        query = query.options(undefer(Job.output_text))
    job = session.scalar(query)
    if job is None:
        raise _no_job(job_id)
    return job


def _no_job(job_id: str) -> NotFound:
    return NotFound(f"There is no job '{job_id}'", param="id")


def page(session: Session, tenant_id: str, *, after: str | None, limit: int, status: Status | None = None) -> list[Job]:
    """The tenant's jobs, newest first, from behind the job id after, at most limit of them."""
    query = select(Job).where(Job.tenant_id == tenant_id).options(undefer(Job.output_text))
    if after is not None:
        query = query.where(Job.id < after)
    if status is not None:
        query = query.where(Job.status == status.value)
    return list(session.scalars(query.order_by(Job.id.desc()).limit(limit)))


def add_progress(session: Session, jobs: Iterable[Job]) -> None:
    """Set output_text and completion_tokens of jobs that have not ended to what is persisted so far, for showing only.

    The rows themselves get these at the terminal move.
    """
    unfinished = [job for job in jobs if not Status(job.status).is_terminal]
    logs = _logs(session, [job.id for job in unfinished if job.attempt > 0])
    for job in unfinished:
        log = logs.get(job.id)
        set_committed_value(job, "output_text", "" if log is None else log.output_text)
        set_committed_value(job, "completion_tokens", 0 if log is None else log.completion_tokens)


# ---- the client's moves


def cancel(session: Session, tenant_id: str, job_id: str) -> tuple[Job, list[Event]]:
    """Cancel a job that has not ended. From the commit on, its worker's writes have no effect.

    Raises NotFound, and Conflict when it had ended; a second cancel of a cancelled job returns it as it is.
    """
    locked = _lock(session, Job.id == job_id, Job.tenant_id == tenant_id)
    if not locked:
        raise _no_job(job_id)
    (job,) = locked
    if job.status == Status.CANCELLED:
        return find(session, tenant_id, job_id), []
    if Status(job.status).is_terminal:
        raise Conflict(f"Job '{job_id}' has already {job.status}: it cannot be cancelled")
    moved = move(session, [job], Status.CANCELLED)
    return find(session, tenant_id, job_id), moved


def cancel_batch(session: Session, batch_id: str, *, limit: int = 1000) -> list[Event]:
    """Cancel up to limit unfinished jobs of a batch."""
    jobs = _lock(session, Job.batch_id == batch_id, Job.status.in_(["queued", "running"]), limit=limit)
    return move(session, jobs, Status.CANCELLED)


def remove(session: Session, tenant_id: str, job_id: str) -> list[Event]:
    """Delete a job and its events; one that has not ended is cancelled first.

    Raises NotFound, and Conflict for a row of a batch: the batch counts it.
    """
    job = find(session, tenant_id, job_id, with_output=False)
    if job.batch_id is not None:
        raise Conflict(f"Job '{job_id}' is a row of batch '{job.batch_id}' and is kept with it")
    moved = [] if Status(job.status).is_terminal else _cancel_unless_ended(session, tenant_id, job_id)
    session.execute(delete(Job).where(Job.id == job_id))
    return moved


def _cancel_unless_ended(session: Session, tenant_id: str, job_id: str) -> list[Event]:
    try:
        return cancel(session, tenant_id, job_id)[1]
    except Conflict:
        return []  # it ended while we looked


# ---- the worker's moves


def claim(session: Session, owner: str, dispatch_numbers: Mapping[str, int]) -> list[Claim]:
    """Take the queued jobs among those that messages named. What is not returned is a duplicate, to be dropped.

    dispatch_numbers maps a job id to the number that its message carried. A worker that was declared dead gets none.
    """
    alive = (
        select(tables.Worker.id)
        .where(tables.Worker.id == owner, tables.Worker.dead.is_(False))
        .with_for_update(read=True)
    )
    if session.scalar(alive) is None:
        return []
    jobs = _lock(session, Job.id.in_(dispatch_numbers), Job.status == "queued", skip_locked=True)
    if not jobs:
        return []
    for job in jobs:
        job.attempt += 1
        job.owner = owner
        job.claimed_number = dispatch_numbers[job.id]
        job.dispatch_number = None
        job.dispatched_at = None
    moved = {event.job_id: event for event in move(session, jobs, Status.RUNNING)}
    resumed = _tokens_of(session, [job.id for job in jobs if job.attempt > 1])
    left_s = func.extract("epoch", Job.deadline_at - tables.NOW)
    rows = session.execute(
        select(Job.id, Job.prompt_ids, Job.sampling, left_s.label("left_s"), tables.Tenant.weight)
        .join(tables.Tenant, tables.Tenant.id == Job.tenant_id)
        .where(Job.id.in_(moved))
    )
    inputs = {row.id: row for row in rows}
    return [
        Claim(
            job_id=job.id,
            tenant_id=job.tenant_id,
            tier=Tier(job.tier),
            attempt=job.attempt,
            last_event=moved[job.id].number,
            prompt_ids=tuple(inputs[job.id].prompt_ids),
            resumed_ids=tuple(resumed.get(job.id, ())),
            sampling=inputs[job.id].sampling,
            deadline_s=float(inputs[job.id].left_s),
            weight=inputs[job.id].weight,
            counter=job.counter,
        )
        for job in jobs
    ]


def started_events(claims: Sequence[Claim]) -> list[Event]:
    """The events of a claim, to be announced after its commit."""
    return [
        Event(claim.job_id, claim.last_event, Status.RUNNING.value, {"status": "running", "attempt": claim.attempt})
        for claim in claims
    ]


def _tokens_of(session: Session, job_ids: Collection[str]) -> dict[str, list[int]]:
    """The persisted tokens of each job, in order."""
    tokens: dict[str, list[int]] = {}
    if not job_ids:
        return tokens
    rows = session.execute(
        select(tables.Event.job_id, tables.Event.token_ids)
        .where(tables.Event.job_id.in_(job_ids), tables.Event.token_ids.is_not(None))
        .order_by(tables.Event.job_id, tables.Event.number)
    )
    for job_id, token_ids in rows:
        tokens.setdefault(job_id, []).extend(token_ids or ())
    return tokens


def finish(session: Session, owner: str, finished: Sequence[Finished]) -> list[Event]:
    """End attempts that owner still runs. What has no event in the answer had been taken away: it has no effect."""
    by_id = {end.job_id: end for end in finished}
    jobs = [
        job
        for job in _lock(session, Job.id.in_(by_id), Job.status == "running", Job.owner == owner)
        if job.attempt == by_id[job.id].attempt
    ]
    _append_last_tokens(session, jobs, by_id)
    moved: list[Event] = []
    for status in Status:
        ending = [job for job in jobs if by_id[job.id].status is status]
        for job in ending:
            job.finish_reason = by_id[job.id].finish_reason
            error = by_id[job.id].error
            job.error = None if error is None else dict(error)
        moved += move(session, ending, status)
    return moved


def _append_last_tokens(session: Session, jobs: Sequence[Job], finished: Mapping[str, Finished]) -> None:
    """Keep the last tokens, which have no text of their own, with the job's last event: charged is what is kept."""
    for job in jobs:
        token_ids = finished[job.id].token_ids
        if token_ids:
            last = select(func.max(tables.Event.number)).where(tables.Event.job_id == job.id).scalar_subquery()
            session.execute(
                update(tables.Event)
                .where(tables.Event.job_id == job.id, tables.Event.number == last)
                .values(token_ids=func.coalesce(tables.Event.token_ids, text("'{}'::int[]")).op("||")(list(token_ids)))
                .execution_options(synchronize_session=False)
            )


def hand_back(session: Session, owner: str, job_ids: Collection[str]) -> list[Event]:
    """Put jobs that owner runs and will not finish back in line, at its front."""
    jobs = _lock(session, Job.id.in_(job_ids), Job.status == "running", Job.owner == owner)
    for job in jobs:
        job.handed_back = True
    return move(session, jobs, Status.QUEUED, reason="handed back by its worker")


# ---- the sweep's moves


IS_ORPHAN = and_(
    Job.status == "running", Job.owner.not_in(select(tables.Worker.id).where(tables.Worker.dead.is_(False)))
)
IS_EXPIRED = and_(Job.status.in_(["queued", "running"]), Job.deadline_at <= tables.STATEMENT_TIME)


def is_unclaimed(grace_s: float) -> ColumnElement[bool]:
    """A message named it more than grace_s ago, and no worker has claimed it yet."""
    return and_(
        Job.status == "queued",
        Job.dispatch_number.is_not(None),
        Job.dispatched_at < tables.STATEMENT_TIME - timedelta(seconds=grace_s),
    )


def requeue_orphans(session: Session, *, max_deaths: int, limit: int = 500) -> list[Event]:
    """Put running jobs whose worker is dead back in line, at its front; one that keeps killing workers fails as poison.

    A death counts against a job only if its worker may have been computing it, for a job that merely waited in the
    engine killed nobody; and an attempt that made progress before its worker died clears the job.
    """
    jobs = _lock(session, IS_ORPHAN, skip_locked=True, limit=limit)
    if not jobs:
        return []
    logs = _logs(session, [job.id for job in jobs], with_output=False)
    progressed = {job.id for job in jobs if logs[job.id].completion_tokens > job.tokens_at_death}
    computed = _computed(session, jobs, progressed)
    for job in jobs:
        if job.id in progressed:
            job.deaths = 0
        elif job.id in computed:
            job.deaths += 1
        job.tokens_at_death = logs[job.id].completion_tokens
        job.handed_back = True
    poison = [job for job in jobs if job.deaths >= max_deaths]
    for job in poison:
        job.error = {"code": "poison", "message": f"{job.deaths} workers died while they ran this job"}
    return move(session, poison, Status.FAILED) + move(
        session, [job for job in jobs if job.deaths < max_deaths], Status.QUEUED, reason="its worker was lost"
    )


def _computed(session: Session, jobs: Sequence[Job], progressed: Collection[str]) -> set[str]:
    """Which jobs of dead workers may have been in their running batches.

    As many as a worker had slots, in the order in which its engine takes them: by rank, then those that had begun, then
    as they were dispatched. All jobs of a worker that left no row.
    """
    owners = {job.owner for job in jobs if job.owner is not None}
    slots = dict(
        session.execute(select(tables.Worker.id, tables.Worker.slots).where(tables.Worker.id.in_(owners))).all()
    )
    computed: set[str] = set()
    for owner in owners:
        line = sorted(
            (job for job in jobs if job.owner == owner),
            key=lambda job: (POLICIES[Tier(job.tier)].rank, job.id not in progressed, job.claimed_number or 0),
        )
        computed |= {job.id for job in line[: slots.get(owner)]}
    return computed


def expire(session: Session, *, limit: int = 500) -> list[Event]:
    """End up to limit jobs whose deadline has passed."""
    # Found by their deadlines and then locked by their ids: in one step, all jobs might be looked through by their ids.
    late = select(Job.id).where(IS_EXPIRED).order_by(Job.deadline_at).limit(limit)
    jobs = _lock(session, Job.id.in_(late), IS_EXPIRED, skip_locked=True)
    for job in jobs:
        job.error = dict(DEADLINE_EXCEEDED)
    return move(session, jobs, Status.EXPIRED)


def forget_lost_messages(session: Session, model: str, tier: Tier, *, queue_is_empty: bool, grace_s: float) -> int:
    """Take back dispatch numbers whose message was lost at the broker, so that dispatch sends the jobs again.

    A message counts as lost when its queue is empty, or when one with a higher number was claimed: queues are first in,
    first out. Younger ones than grace_s are left alone. Returns how many there were.
    """
    claimed = select(func.max(Job.claimed_number)).where(Job.model == model, Job.tier == tier.value).scalar_subquery()
    old = and_(Job.model == model, Job.tier == tier.value, is_unclaimed(grace_s))
    lost = old if queue_is_empty else and_(old, Job.dispatch_number < claimed)
    locked = select(Job.id).where(lost).order_by(Job.id).with_for_update(skip_locked=True)
    forgotten = session.execute(
        update(Job)
        .where(Job.id.in_(locked))
        .values(dispatch_number=None, dispatched_at=None)
        .returning(Job.id)
        .execution_options(synchronize_session=False)
    )
    return len(forgotten.all())
