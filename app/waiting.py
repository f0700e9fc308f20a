"""How long the lines are, and of a job that waits: its position, when it may start, and what it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from sqlalchemy import text
from sqlalchemy.orm import Session

from app import db, line
from app.tables import Job
from app.tiers import Tier


class Reason(StrEnum):
    """What a queued job waits for."""

    PARENTS = "parents"
    """Jobs that it names: it stands in no line before the last of them has ended."""
    NO_WORKER = "no_worker"
    """No worker that serves its model is there and takes jobs."""
    DISPATCHED = "dispatched"
    """Nothing but a worker's next look at its queue."""
    SLOTS = "slots"
    """A slot: it is the next of its tier, and the slots are taken by jobs that it may not displace."""
    OWN_JOBS = "own_jobs"
    """Jobs of its own tenant that came before it."""
    SHARE = "share"
    """Jobs of tenants that have been served less, or that came before it."""


@dataclass(frozen=True, slots=True)
class Wait:
    position: int
    """Jobs that are to start before it, as things stand; more paid work may overtake it. Of one that waits for parents,
    how many of these have not ended."""
    estimated_start: datetime | None
    """When that many will have started, at the pace of late; None while none has started or no worker is there."""
    reason: Reason


@dataclass(frozen=True, slots=True)
class Depth:
    """A tier of a model."""

    tier: Tier
    queued: int
    """Jobs that wait, in line and at the broker; not those that wait for their parents."""
    running: int
    oldest_wait_s: float
    """How long the job that has waited longest has done so, in seconds; 0 where none waits."""
    starts_per_s: float
    """Jobs that started lately, per second."""


_PACE = text(
    """
    select count(*) / greatest(extract(epoch from clock_timestamp() - min(started_at)), 0.001) as starts_per_s
    from (
        select started_at from jobs where model = :model and tier = :tier and claimed_number is not null
        order by claimed_number desc limit 50
    ) as latest
    where started_at > clock_timestamp() - interval '5 minutes'
    """
)

_HAS_WORKER = text("select exists (select from workers where model = :model and not dead and ready)")

_AT_BROKER = text(
    """
    select count(*) from jobs where status = 'queued' and model = :model and tier = :tier
    and dispatch_number is not null and (cast(:number as bigint) is null or dispatch_number < :number)
    """
)

_OPEN_PARENTS = text(
    """
    select count(*) from parents join jobs on jobs.id = parent_id
    where job_id = :id and status in ('queued', 'running')
    """
)

_DEPTHS = text(
    """
    select count(*) filter (where status = 'queued') as queued, count(*) filter (where status = 'running') as running,
        coalesce(
            extract(epoch from clock_timestamp() - min(created_at) filter (where status = 'queued')), 0
        ) as oldest_s
    from jobs where status in ('queued', 'running') and model = :model and tier = :tier and not awaits_parents
    """
)


def wait_of(session: Session, job: Job) -> Wait:
    """What a queued job waits for."""
    if job.awaits_parents:
        return Wait(session.execute(_OPEN_PARENTS, {"id": job.id}).scalar_one(), None, Reason.PARENTS)
    asked = {"model": job.model, "tier": job.tier}
    at_broker: int = session.execute(_AT_BROKER, asked | {"number": job.dispatch_number}).scalar_one()
    if job.dispatch_number is not None:
        ahead, reason = line.Ahead(), Reason.DISPATCHED
    else:
        ahead = line.ahead(session, job)
        reason = Reason.SHARE if ahead.others else Reason.OWN_JOBS if ahead.own else Reason.SLOTS
    position = at_broker + ahead.handed_back + ahead.own + ahead.others
    if not session.execute(_HAS_WORKER, asked).scalar_one():
        return Wait(position, None, Reason.NO_WORKER)
    pace = _pace(session, asked)
    starts_in = timedelta(seconds=(position + 1) / pace) if pace else None
    return Wait(position, None if starts_in is None else db.now(session) + starts_in, reason)


def depths(session: Session, model: str) -> Sequence[Depth]:
    """The model's tiers."""
    found = []
    for tier in Tier:
        asked = {"model": model, "tier": tier.value}
        row = session.execute(_DEPTHS, asked).one()
        found.append(Depth(tier, row.queued, row.running, float(row.oldest_s), _pace(session, asked)))
    return found


def _pace(session: Session, asked: Mapping[str, str]) -> float:
    return float(session.execute(_PACE, asked).scalar_one())
