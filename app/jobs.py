"""Jobs as their tenants have them: submitted, read, cancelled, removed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import DateTime, bindparam, delete, func, select, text
from sqlalchemy.orm import Session, undefer
from sqlalchemy.orm.attributes import set_committed_value

from app import db, limits, programs, settlements, tables
from app.errors import Conflict, KeyReused, NotFound, QueueFull, QuotaExceeded, Refusal
from app.events import Event
from app.ids import new_id
from app.moves import Move, Status, lock_where, logs_of, move
from app.programs import Child
from app.tables import Job
from app.tiers import Tier


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as it was accepted: checked, rendered and tokenized."""

    tier: Tier
    model: str
    model_revision: str
    prompt_ids: tuple[int, ...]
    """None yet of a child."""
    sampling: Mapping[str, Any]
    """The fields of engine.request.Sampling that are not its defaults, max_tokens and the seed always."""
    deadline_s: float
    """Seconds from the submission until the job expires."""
    metadata: Mapping[str, str]
    num_choices: int = 1
    webhook_url: str | None = None
    asked: Mapping[str, Any] | None = None
    """How it was asked for, where that was in OpenAI's words: see app.asked."""
    batch_id: str | None = None
    row_number: int | None = None
    custom_id: str | None = None
    child: Child | None = None
    """Where it names parents."""

    @property
    def most_tokens(self) -> int:
        """What the job may use, prompt and output together."""
        most_prompt_tokens = len(self.prompt_ids) if self.child is None else self.child.most_prompt_tokens
        return most_prompt_tokens + self.num_choices * int(self.sampling["max_tokens"])

    @property
    def awaits_parents(self) -> bool:
        return self.child is not None

    @property
    def depth(self) -> int:
        return 0 if self.child is None else self.child.depth

    @property
    def has_logprobs(self) -> bool:
        return self.sampling.get("top_logprobs") is not None


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


def submit(session: Session, tenant_id: str, orders: Sequence[Order], *, max_queued: int) -> list[Submitted | Refusal]:
    """Write jobs of a tenant, in state queued: what became of each, in their order.

    They are of one tier, and their keys are distinct. Their first events are not to be announced: nobody follows a job
    before he knows its id, and then he reads the rows. The same Idempotency-Key with the same body gives the job that
    it made. A refusal is one order's alone: KeyReused for another body, Conflict when that job was deleted since,
    QueueFull when the tenant has max_queued jobs of the tier in line, QuotaExceeded when its tokens of today do not
    suffice for the most that the job may use.
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
            id, tenant_id, tier, model, model_revision, status, prompt_ids, prompt_tokens, sampling, num_choices,
            has_logprobs, metadata, webhook_url, asked, created_at, deadline_at, reserved_tokens, batch_id, row_number,
            custom_id, awaits_parents, depth
        )
        select id, :tenant_id, tier, model, model_revision, 'queued', prompt_ids, cardinality(prompt_ids), sampling,
            num_choices, has_logprobs, metadata, webhook_url, asked, :moment,
            :moment + make_interval(secs => deadline_s), reserved_tokens, batch_id, row_number, custom_id,
            awaits_parents, depth
        from json_to_recordset(cast(:jobs as json)) as asked (
            id text, tier text, model text, model_revision text, prompt_ids int[], sampling jsonb, num_choices int,
            has_logprobs boolean, metadata jsonb, webhook_url text, asked jsonb, deadline_s float8, reserved_tokens int,
            batch_id text, row_number int, custom_id text, awaits_parents boolean, depth int
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
    """Write new jobs by their ids, in state queued, each with its first event: one statement, however many they are.

    And one more for those that wait for parents.
    """
    jobs = [
        {
            **{name: getattr(submission, name) for name in _WRITTEN},
            "id": job_id,
            "reserved_tokens": submission.most_tokens if is_reserved else 0,
        }
        for job_id, submission in submissions.items()
    ]
    session.execute(_WRITE, {"jobs": json.dumps(jobs), "tenant_id": tenant_id, "moment": moment})
    programs.write(session, {job_id: each.child for job_id, each in submissions.items() if each.child is not None})


_WRITTEN = [field.name for field in fields(Submission) if field.name != "child"]
_WRITTEN += ["has_logprobs", "awaits_parents", "depth"]


def _new_job(job_id: str, tenant_id: str, submission: Submission, moment: datetime) -> Job:
    """A job as it has just been written, to be shown."""
    return Job(
        id=job_id,
        tenant_id=tenant_id,
        tier=submission.tier.value,
        model=submission.model,
        model_revision=submission.model_revision,
        status=Status.QUEUED.value,
        prompt_tokens=len(submission.prompt_ids),
        num_choices=submission.num_choices,
        has_logprobs=submission.has_logprobs,
        job_metadata=dict(submission.metadata),
        asked=submission.asked,
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


def made_before(session: Session, tenant_id: str, idempotency: Idempotency) -> Submitted | None:
    """The job that the key made, if it did; what its body names may be gone since. Raises what refuses a replay."""
    if session.get(tables.IdempotencyRecord, (tenant_id, idempotency.key)) is None:
        return None
    replayed = _replayed(session, tenant_id, idempotency)
    if isinstance(replayed, Refusal):
        raise replayed
    return replayed


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
    logs = logs_of(session, [job.id for job in unfinished if job.attempt > 0])
    for job in unfinished:
        log = logs.get(job.id)
        set_committed_value(job, "output_text", "" if log is None else log.output_text)
        set_committed_value(job, "completion_tokens", 0 if log is None else log.completion_tokens)


def cancel(session: Session, tenant_id: str, job_id: str) -> tuple[Job, list[Event]]:
    """Cancel a job that has not ended. From the commit on, its worker's writes have no effect.

    Raises NotFound, and Conflict when it had ended; a second cancel of a cancelled job returns it as it is.
    """
    locked = lock_where(session, Job.id == job_id, Job.tenant_id == tenant_id)
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
    jobs = lock_where(session, Job.batch_id == batch_id, Job.status.in_(["queued", "running"]), limit=limit)
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
    programs.look_now(session, job_id)
    return moved


def _cancel_unless_ended(session: Session, tenant_id: str, job_id: str) -> list[Event]:
    try:
        return cancel(session, tenant_id, job_id)[1]
    except Conflict:
        return []  # it ended while we looked
