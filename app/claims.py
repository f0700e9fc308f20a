"""What a worker does with jobs: claim, finish, hand back. Its id and the attempt's number are the fence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app import tables
from app.events import TOKENS, Event
from app.moves import TERMINAL, Move, Status, is_among, lock_where, move
from app.tables import Job
from app.tiers import Tier


@dataclass(frozen=True, slots=True)
class Begun:
    """A choice of a job, as far as it came."""

    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    """Set once it has ended; others may go on."""


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
    begun: tuple[Begun, ...]
    """What earlier attempts persisted of each choice."""
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
    """Of the first choice."""
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
    jobs = lock_where(
        session, is_among(dispatch_numbers), Job.status == "queued", ~Job.awaits_parents, skip_locked=True
    )
    begun = [Move(job.id, owner=owner, claimed_number=dispatch_numbers[job.id]) for job in jobs]
    numbers = {event.job_id: event.number for event in move(session, begun, Status.RUNNING)}
    begun_before = _begun(session, [job.id for job in jobs if job.attempt > 0])
    left_s = func.extract("epoch", Job.deadline_at - tables.NOW)
    rows = session.execute(
        select(
            *(Job.id, Job.tenant_id, Job.tier, Job.attempt, Job.prompt_ids, Job.sampling, Job.counter),
            *(Job.num_choices, left_s.label("left_s"), tables.Tenant.weight),
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
            begun=tuple(begun_before.get((row.id, index), _NOTHING) for index in range(row.num_choices)),
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


_NOTHING = Begun()


def _begun(session: Session, job_ids: Collection[str]) -> dict[tuple[str, int], Begun]:
    """What is persisted of the jobs' choices, by job id and index."""
    begun: dict[tuple[str, int], Begun] = {}
    if not job_ids:
        return begun
    event = tables.Event
    rows = session.execute(
        select(event.job_id, event.choice, event.token_ids, event.data["finish_reason"].as_string())
        .where(event.job_id.in_(job_ids), event.kind == TOKENS)
        .order_by(event.job_id, event.number)
    )
    for job_id, choice, token_ids, finish_reason in rows:
        before = begun.get((job_id, choice), _NOTHING)
        begun[job_id, choice] = Begun((*before.token_ids, *(token_ids or ())), finish_reason)
    return begun


def finish(session: Session, owner: str, finished: Sequence[Finished]) -> list[Event]:
    """End attempts that owner still runs. What has no event in the answer had been taken away: it has no effect."""
    by_id = {end.job_id: end for end in finished}
    held = lock_where(session, is_among(by_id), Job.status == "running", Job.owner == owner)
    ends = [by_id[job.id] for job in held if job.attempt == by_id[job.id].attempt]
    moved: list[Event] = []
    for status in TERMINAL:
        ending = [end for end in ends if end.status is status]
        moves = [Move(end.job_id, finish_reason=end.finish_reason, error=end.error) for end in ending]
        moved += move(session, moves, status)
    return moved


def hand_back(session: Session, owner: str, job_ids: Collection[str]) -> list[Event]:
    """Put jobs that owner runs and will not finish back in line, at its front."""
    jobs = lock_where(session, is_among(job_ids), Job.status == "running", Job.owner == owner)
    return move(session, [Move(job.id) for job in jobs], Status.QUEUED, reason="handed back by its worker")
