"""What the sweep does with jobs that nobody looks after: a dead worker's, those past their deadline, lost messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta

from sqlalchemy import ColumnElement, and_, func, select, update
from sqlalchemy.orm import Session

from app import tables
from app.events import Event
from app.moves import DEADLINE_EXCEEDED, Locked, Move, Status, lock_where, logs_of, move
from app.tables import Job
from app.tiers import POLICIES, Tier

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
    jobs = lock_where(session, IS_ORPHAN, skip_locked=True, limit=limit)
    if not jobs:
        return []
    logs = logs_of(session, [job.id for job in jobs], with_output=False)
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


def _computed(session: Session, jobs: Sequence[Locked], progressed: Collection[str]) -> set[str]:
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
    jobs = lock_where(session, Job.id.in_(late), IS_EXPIRED, skip_locked=True)
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
