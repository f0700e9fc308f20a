"""What a worker does with jobs: claim, finish, hand back. Its id and the attempt's number are the fence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from app import tables
from app.events import Event
from app.moves import TERMINAL, Move, Status, is_among, lock_where, move
from app.tables import Job
from app.tiers import Tier


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
    jobs = lock_where(session, is_among(dispatch_numbers), Job.status == "queued", skip_locked=True)
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
        .where(is_among(numbers))
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
    held = lock_where(session, is_among(by_id), Job.status == "running", Job.owner == owner)
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
    jobs = lock_where(session, is_among(job_ids), Job.status == "running", Job.owner == owner)
    return move(session, [Move(job.id) for job in jobs], Status.QUEUED, reason="handed back by its worker")
