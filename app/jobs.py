"""Jobs: submit, claim, finish, cancel, sweep. Every change of a status goes through move().

    queued ──────▶ running ──────▶ succeeded | failed | cancelled | expired
       ▲  └────────────┼─────────▶ failed | cancelled | expired
       └───────────────┘ handed back, or the owner was lost

Rows are locked in the order of their ids, by a statement of its own before they are changed: a statement that waits
for a lock would otherwise number its event by an old snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    DateTime,
    Text,
    TextClause,
    and_,
    any_,
    bindparam,
    delete,
    func,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.orm import Session, undefer
from sqlalchemy.orm.attributes import set_committed_value

from app import db, limits, settlements, tables, webhooks
from app.errors import Conflict, KeyReused, NotFound, QueueFull, QuotaExceeded, Refusal
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
class Order:
    """A submission, and the key under which it came."""

    submission: Submission
    idempotency: Idempotency | None = None


@dataclass(frozen=True, slots=True)
class Submitted:
    """The job that a submission made, or had made before."""

    job: Job
    is_new: bool


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


@dataclass(frozen=True, slots=True)
class Move:
    """A locked job that is to change its status, and the facts that change with it."""

    id: str
    owner: str | None = None
    """The worker that runs it from now on."""
    claimed_number: int | None = None
    """The dispatch number of the message by which it is claimed; None leaves it, as below."""
    deaths: int | None = None
    tokens_at_death: int | None = None
    finish_reason: str | None = None
    error: Mapping[str, Any] | None = None


def move(session: Session, moves: Sequence[Move], to: Status, *, reason: str | None = None) -> list[Event]:
    """Move locked jobs to a status, each with its next event; at a terminal one also with its settlement and its
    webhook's delivery.

    Returns the events in the order of the moves, to be announced after the commit. Raises AssertionError for a
    transition that the table does not allow.
    """
    if not moves:
        return []
    rows = session.execute(
        _MOVES[to],
        {
            "moves": json.dumps([asdict(each) for each in moves]),
            "to": to.value,
            "allowed_from": [status.value for status, allowed in TRANSITIONS.items() if to in allowed],
            "reason": reason,
        },
    )
    moved = {row.id: row for row in rows}
    assert len(moved) == len(moves), f"{[each.id for each in moves if each.id not in moved]} cannot become {to}"
    if to.is_terminal:
        settlements.settle(session, list(moved))
        webhooks.deliver(session, [row.id for row in moved.values() if row.has_webhook])
    return [Event(each.id, moved[each.id].number, to.value, moved[each.id].facts) for each in moves]


def _move_statement(changes: str, facts: str) -> TextClause:
    """The statement of a move: what it changes beside the status, and what its event says of the changed row.

    clock is the time by the database's clock; log the job's events, summed up.
    """
    return text(
        f"""
        with asked as materialized (
            select * from json_to_recordset(cast(:moves as json)) as asked (
                id text, owner text, claimed_number bigint, deaths int, tokens_at_death int, finish_reason text,
                error jsonb
            )
        ), moved as (
            update jobs set status = :to, owner = asked.owner, {changes}
            from asked cross join lateral (
                select coalesce(max(number), 0) as last_number, string_agg(text, ''::bytea order by number) as text,
                    coalesce(sum(cardinality(token_ids)), 0) as tokens
                from events where job_id = asked.id
            ) as log cross join clock_timestamp() as clock
            where jobs.id = asked.id and jobs.status = any(:allowed_from)
            returning jobs.id, log.last_number + 1 as number, {facts} as facts, webhook_url is not null as has_webhook
        ), told as (
            insert into events (job_id, number, kind, data) select id, number, :to, facts from moved
        )
        select id, number, facts, has_webhook from moved
        """
    )


_END = _move_statement(
    """
    finished_at = clock, output_text = coalesce(log.text, ''::bytea), completion_tokens = log.tokens,
    finish_reason = asked.finish_reason, error = asked.error, deaths = coalesce(asked.deaths, jobs.deaths),
    tokens_at_death = coalesce(asked.tokens_at_death, jobs.tokens_at_death)
    """,
    f"""
    jsonb_build_object(
        'status', status, 'finish_reason', jobs.finish_reason, 'error', jobs.error, 'usage', jsonb_build_object(
            'prompt_tokens', {settlements.CHARGED_PROMPT}, 'completion_tokens', completion_tokens,
            'total_tokens', {settlements.CHARGED_PROMPT} + completion_tokens
        )
    )
    """,
)
_MOVES: dict[Status, TextClause] = {
    Status.QUEUED: _move_statement(
        """
        handed_back = true, deaths = coalesce(asked.deaths, jobs.deaths),
        tokens_at_death = coalesce(asked.tokens_at_death, jobs.tokens_at_death)
        """,
        "jsonb_strip_nulls(jsonb_build_object('status', status, 'reason', cast(:reason as text)))",
    ),
    Status.RUNNING: _move_statement(
        """
        attempt = attempt + 1, claimed_number = asked.claimed_number, dispatch_number = null, dispatched_at = null,
        started_at = coalesce(started_at, clock)
        """,
        "jsonb_build_object('status', status, 'attempt', attempt)",
    ),
    **dict.fromkeys(TERMINAL, _END),
}


@dataclass(frozen=True, slots=True)
class _Log:
    """A job's events, summed up."""

    output_text: str
    """The texts, joined: the result is what was shown, by construction."""
    completion_tokens: int


_LOGS = text(
    """
    select id, coalesce(string_agg(text, ''::bytea order by number) filter (where :with_output), ''::bytea)
        as output_text, coalesce(sum(cardinality(token_ids)), 0) as completion_tokens
    from unnest(cast(:ids as text[])) as asked (id) left join events on events.job_id = asked.id
    group by id
    """
)


def _logs(session: Session, job_ids: Collection[str], *, with_output: bool = True) -> dict[str, _Log]:
    """The log of each job; without its output's text, if that is not wanted."""
    if not job_ids:
        return {}
    rows = session.execute(_LOGS, {"ids": list(job_ids), "with_output": with_output})
    return {row.id: _Log(bytes(row.output_text).decode(), int(row.completion_tokens)) for row in rows}


@dataclass(frozen=True, slots=True)
class _Locked:
    """What moves look at of a job that they locked."""

    id: str
    tier: str
    status: str
    attempt: int
    owner: str | None
    claimed_number: int | None
    deaths: int
    tokens_at_death: int


_LOCKED = [getattr(Job, field.name) for field in fields(_Locked)]


def _lock(
    session: Session, *conditions: ColumnElement[bool], skip_locked: bool = False, limit: int | None = None
) -> list[_Locked]:
    rows = session.execute(
        select(*_LOCKED).where(*conditions).order_by(Job.id).limit(limit).with_for_update(skip_locked=skip_locked)
    )
    return [_Locked(*row) for row in rows]


def _is_among(job_ids: Collection[str]) -> ColumnElement[bool]:
    """One parameter, however many they are: the statement stays the same, and is prepared once."""
    return Job.id == any_(literal(list(job_ids), ARRAY(Text)))


def lock(session: Session, job_ids: Collection[str]) -> None:
    """Lock jobs ahead of several writes to them, so that the order of ids holds over all of these together."""
    session.execute(select(Job.id).where(_is_among(job_ids)).order_by(Job.id).with_for_update())


# ---- submit and read


def submit(
    session: Session,
    tenant_id: str,
    submission: Submission,
    *,
    max_queued: int,
    idempotency: Idempotency | None = None,
) -> tuple[Job, bool]:
    """Write a job in state queued. Returns it, and whether it is new.

    Its first event is not to be announced: nobody follows a job before he knows its id, and then he reads the rows.
    The same Idempotency-Key with the same body returns the job that it made. Raises KeyReused for another body,
    Conflict when that job was deleted since, QueueFull when the tenant has max_queued jobs of the tier in line,
    QuotaExceeded when its tokens of today do not suffice for the most that the job may use.
    """
    (outcome,) = submit_all(session, tenant_id, [Order(submission, idempotency)], max_queued=max_queued)
    if isinstance(outcome, Refusal):
        raise outcome
    return outcome.job, outcome.is_new


def submit_all(
    session: Session, tenant_id: str, orders: Sequence[Order], *, max_queued: int
) -> list[Submitted | Refusal]:
    """Write jobs of a tenant, each as submit does: what became of each, in their order.

    They are of one tier, and their keys are distinct.
    """
    (tier,) = {order.submission.tier for order in orders}
    by_id = {new_id("job"): order for order in orders}
    # Where a key is not bound, somebody used it before, or at the same moment and has committed since: his job is the
    # one. The next statement of a READ COMMITTED transaction sees what he wrote.
    bound = _remember(
        session, tenant_id, {job_id: order.idempotency for job_id, order in by_id.items() if order.idempotency}
    )
    fresh = {
        job_id: order.submission for job_id, order in by_id.items() if order.idempotency is None or job_id in bound
    }
    moment, places = _places(session, tenant_id, tier, max_queued)
    refused: dict[str, Refusal] = {job_id: QueueFull() for job_id in list(fresh)[places:]}
    admitted = {job_id: submission for job_id, submission in fresh.items() if job_id not in refused}
    is_reserved, too_many = _reserve(session, tenant_id, admitted, moment)
    refused |= too_many
    written = {job_id: submission for job_id, submission in admitted.items() if job_id not in refused}
    if written:
        _write(session, tenant_id, written, moment, is_reserved=is_reserved)
    if lost := bound & refused.keys():
        _forget(session, tenant_id, lost)
    outcomes: list[Submitted | Refusal] = []
    for job_id, order in by_id.items():
        if job_id in written:
            outcomes.append(Submitted(_new_job(job_id, tenant_id, order.submission, moment), is_new=True))
        elif job_id in refused:
            outcomes.append(refused[job_id])
        else:
            assert order.idempotency is not None
            outcomes.append(_replayed(session, tenant_id, order.idempotency))
    return outcomes


def _reserve(
    session: Session, tenant_id: str, submissions: Mapping[str, Submission], moment: datetime
) -> tuple[bool, dict[str, Refusal]]:
    """Reserve the tokens of the jobs: whether the tenant has a quota at all, and whom it does not suffice for."""
    day = settlements.day_of(moment)
    try:
        most_tokens = sum(submission.most_tokens for submission in submissions.values())
        return limits.reserve(session, tenant_id, day, most_tokens), {}
    except QuotaExceeded as refusal:
        if len(submissions) == 1:
            return True, dict.fromkeys(submissions, refusal)
    refused: dict[str, Refusal] = {}
    for job_id, submission in submissions.items():
        refused |= _reserve(session, tenant_id, {job_id: submission}, moment)[1]
    return True, refused


def submit_rows(session: Session, tenant_id: str, rows: Sequence[Submission]) -> list[str]:
    """Write the jobs of a batch's rows, in state queued; their ids.

    Raises QuotaExceeded when together they may use too much.
    """
    moment = db.now(session)
    most_tokens = sum(row.most_tokens for row in rows)
    is_reserved = bool(rows) and limits.reserve(session, tenant_id, settlements.day_of(moment), most_tokens)
    by_id = {new_id("job"): row for row in rows}
    _write(session, tenant_id, by_id, moment, is_reserved=is_reserved)
    return list(by_id)


def reject_rows(session: Session, tenant_id: str, rows: Sequence[tuple[Submission, Mapping[str, Any]]]) -> list[Event]:
    """Write rows that cannot run as jobs that failed, each with its error, so that the batch's counts add up from one
    table.
    """
    by_id = {new_id("job"): row for row in rows}
    _write(session, tenant_id, {job_id: row for job_id, (row, _) in by_id.items()}, db.now(session))
    return move(session, [Move(job_id, error=error) for job_id, (_, error) in by_id.items()], Status.FAILED)


_WRITE = text(
    """
    with written as (
        insert into jobs (
            id, tenant_id, tier, model, model_revision, status, prompt_ids, prompt_tokens, sampling, metadata,
            webhook_url, created_at, deadline_at, reserved_tokens, batch_id, row_number, custom_id
        )
        select id, :tenant_id, tier, model, model_revision, 'queued', prompt_ids, cardinality(prompt_ids), sampling,
            metadata, webhook_url, :moment, :moment + make_interval(secs => deadline_s), reserved_tokens, batch_id,
            row_number, custom_id
        from json_to_recordset(cast(:jobs as json)) as asked (
            id text, tier text, model text, model_revision text, prompt_ids int[], sampling jsonb, metadata jsonb,
            webhook_url text, deadline_s float8, reserved_tokens int, batch_id text, row_number int, custom_id text
        )
        returning id
    )
    insert into events (job_id, number, kind, data) select id, 1, 'queued', '{"status": "queued"}' from written
    """
).bindparams(bindparam("moment", type_=DateTime(timezone=True)))


def _write(
    session: Session,
    tenant_id: str,
    submissions: Mapping[str, Submission],
    moment: datetime,
    *,
    is_reserved: bool = False,
) -> None:
    """Write new jobs by their ids, in state queued, each with its first event: one statement, however many they are."""
    jobs = [
        {
            **{name: getattr(submission, name) for name in _WRITTEN},
            "id": job_id,
            "reserved_tokens": submission.most_tokens if is_reserved else 0,
        }
        for job_id, submission in submissions.items()
    ]
    session.execute(_WRITE, {"jobs": json.dumps(jobs), "tenant_id": tenant_id, "moment": moment})


_WRITTEN = [field.name for field in fields(Submission)]


def _new_job(job_id: str, tenant_id: str, submission: Submission, moment: datetime) -> Job:
    """A job as it has just been written, to be shown."""
    return Job(
        id=job_id,
        tenant_id=tenant_id,
        tier=submission.tier.value,
        model=submission.model,
        status=Status.QUEUED.value,
        prompt_tokens=len(submission.prompt_ids),
        job_metadata=dict(submission.metadata),
        created_at=moment,
        attempt=0,
        completion_tokens=0,
    )


def _places(session: Session, tenant_id: str, tier: Tier, max_queued: int) -> tuple[datetime, int]:
    """The database's time, and how many more jobs of the tier the tenant may have in line."""
    in_line = (
        select(Job.id)
        .where(Job.tenant_id == tenant_id, Job.tier == tier.value, Job.status == "queued", Job.batch_id.is_(None))
        .limit(max_queued)
        .subquery()
    )
    waiting = select(func.count()).select_from(in_line).scalar_subquery()
    row = session.execute(select(tables.NOW.label("now"), waiting.label("waiting"))).one()
    return row.now, max_queued - row.waiting


def _replayed(session: Session, tenant_id: str, idempotency: Idempotency) -> Submitted | Refusal:
    """The job that the key is bound to; a refusal where it was made by another body, or was deleted since."""
    record = session.get_one(tables.IdempotencyRecord, (tenant_id, idempotency.key))
    if record.fingerprint != idempotency.fingerprint:
        return KeyReused(param="Idempotency-Key")
    try:
        return Submitted(find(session, tenant_id, record.job_id), is_new=False)
    except NotFound:
        return Conflict(f"This Idempotency-Key made job '{record.job_id}', which was deleted", param="Idempotency-Key")


_REMEMBER = text(
    """
    insert into idempotency_records (tenant_id, key, fingerprint, job_id)
    select :tenant_id, key, fingerprint, job_id
    from unnest(cast(:keys as text[]), cast(:fingerprints as bytea[]), cast(:job_ids as text[]))
        as asked (key, fingerprint, job_id)
    order by key
    on conflict do nothing
    returning job_id
    """
)
"""In the order of keys, so that two processes that wait for each other's never do so both ways."""


def _remember(session: Session, tenant_id: str, keys: Mapping[str, Idempotency]) -> set[str]:
    """Bind keys to jobs, by id. Waits for a concurrent holder of a key; what is not returned he has committed."""
    if not keys:
        return set()
    return set(
        session.scalars(
            _REMEMBER,
            {
                "tenant_id": tenant_id,
                "keys": [each.key for each in keys.values()],
                "fingerprints": [each.fingerprint for each in keys.values()],
                "job_ids": list(keys),
            },
        )
    )


def _forget(session: Session, tenant_id: str, job_ids: Collection[str]) -> None:
    """Free the keys of jobs that were not written after all."""
    record = tables.IdempotencyRecord
    session.execute(delete(record).where(record.tenant_id == tenant_id, record.job_id.in_(job_ids)))


def find(session: Session, tenant_id: str, job_id: str, *, with_output: bool = True) -> Job:
    """The tenant's job. Raises NotFound; somebody else's job looks the same as none."""
    query = select(Job).where(Job.id == job_id, Job.tenant_id == tenant_id).execution_options(populate_existing=True)
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
    moved = move(session, [Move(job_id)], Status.CANCELLED)
    return find(session, tenant_id, job_id), moved


def cancel_batch(session: Session, batch_id: str, *, limit: int = 10_000) -> list[Event]:
    """Cancel up to limit unfinished jobs of a batch: all of them, for no more of its rows are read ahead."""
    jobs = _lock(session, Job.batch_id == batch_id, Job.status.in_(["queued", "running"]), limit=limit)
    return move(session, [Move(job.id) for job in jobs], Status.CANCELLED)


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
    jobs = _lock(session, _is_among(dispatch_numbers), Job.status == "queued", skip_locked=True)
    begun = [Move(job.id, owner=owner, claimed_number=dispatch_numbers[job.id]) for job in jobs]
    numbers = {event.job_id: event.number for event in move(session, begun, Status.RUNNING)}
    resumed = _tokens_of(session, [job.id for job in jobs if job.attempt > 0])
    left_s = func.extract("epoch", Job.deadline_at - tables.NOW)
    rows = session.execute(
        select(
            *(Job.id, Job.tenant_id, Job.tier, Job.attempt, Job.prompt_ids, Job.sampling, Job.counter),
            *(left_s.label("left_s"), tables.Tenant.weight),
        )
        .join(tables.Tenant, tables.Tenant.id == Job.tenant_id)
        .where(_is_among(numbers))
        .order_by(Job.id)
    )
    return [
        Claim(
            job_id=row.id,
            tenant_id=row.tenant_id,
            tier=Tier(row.tier),
            attempt=row.attempt,
            last_event=numbers[row.id],
            prompt_ids=tuple(row.prompt_ids),
            resumed_ids=tuple(resumed.get(row.id, ())),
            sampling=row.sampling,
            deadline_s=float(row.left_s),
            weight=row.weight,
            counter=row.counter,
        )
        for row in rows
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
    held = _lock(session, _is_among(by_id), Job.status == "running", Job.owner == owner)
    ends = [by_id[job.id] for job in held if job.attempt == by_id[job.id].attempt]
    _append_last_tokens(session, [end for end in ends if end.token_ids])
    moved: list[Event] = []
    for status in TERMINAL:
        ending = [end for end in ends if end.status is status]
        moves = [Move(end.job_id, finish_reason=end.finish_reason, error=end.error) for end in ending]
        moved += move(session, moves, status)
    return moved


def _append_last_tokens(session: Session, ends: Sequence[Finished]) -> None:
    """Keep last tokens, which have no text of their own, with the job's last event: charged is what is kept."""
    for end in ends:
        last = select(func.max(tables.Event.number)).where(tables.Event.job_id == end.job_id).scalar_subquery()
        session.execute(
            update(tables.Event)
            .where(tables.Event.job_id == end.job_id, tables.Event.number == last)
            .values(token_ids=func.coalesce(tables.Event.token_ids, text("'{}'::int[]")).op("||")(list(end.token_ids)))
            .execution_options(synchronize_session=False)
        )


def hand_back(session: Session, owner: str, job_ids: Collection[str]) -> list[Event]:
    """Put jobs that owner runs and will not finish back in line, at its front."""
    jobs = _lock(session, _is_among(job_ids), Job.status == "running", Job.owner == owner)
    return move(session, [Move(job.id) for job in jobs], Status.QUEUED, reason="handed back by its worker")


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
    poison: list[Move] = []
    others: list[Move] = []
    for job in jobs:
        deaths = 0 if job.id in progressed else job.deaths + (job.id in computed)
        requeued = Move(job.id, deaths=deaths, tokens_at_death=logs[job.id].completion_tokens)
        if deaths < max_deaths:
            others.append(requeued)
        else:
            error = {"code": "poison", "message": f"{deaths} workers died while they ran this job"}
            poison.append(replace(requeued, error=error))
    return move(session, poison, Status.FAILED) + move(session, others, Status.QUEUED, reason="its worker was lost")


def _computed(session: Session, jobs: Sequence[_Locked], progressed: Collection[str]) -> set[str]:
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
    return move(session, [Move(job.id, error=DEADLINE_EXCEEDED) for job in jobs], Status.EXPIRED)


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
