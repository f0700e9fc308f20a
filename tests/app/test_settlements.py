"""What jobs are charged, once, and where it is added up."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import func, select, update

from app import dispatch, jobs, moves, recovery
from app.db import Database
from app.moves import Move, Status
from app.settlements import usage_of
from app.tables import Job, Settlement, UsageDay
from app.tiers import Tier

Bill = Callable[[], dict[tuple[str, str], tuple[int, int, int]]]


@pytest.fixture
def bill(db: Database, owner: Any) -> Bill:
    """The tenant's usage: by day and tier, how many jobs, prompt tokens and generated tokens."""

    def read() -> dict[tuple[str, str], tuple[int, int, int]]:
        dispatch.settle(db)
        with db.transaction() as session:
            assert not session.scalar(select(func.count()).select_from(Settlement)), "all were folded"
            days = session.scalars(select(UsageDay).where(UsageDay.tenant_id == owner.tenant_id))
            return {
                (day.day.isoformat(), day.tier): (day.jobs, day.prompt_tokens, day.completion_tokens) for day in days
            }

    return read


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def test_a_job_is_charged_what_was_persisted_of_it(submit: Any, worker: Any, bill: Bill) -> None:
    worker.run(submit(), "abc", "de")
    assert bill() == {(today(), "paid"): (1, 2, 5)}
    worker.run(submit(), "a")
    worker.run(submit(tier=Tier.BULK), "ab")
    assert bill() == {(today(), "paid"): (2, 4, 6), (today(), "bulk"): (1, 2, 2)}


@pytest.mark.parametrize("status", [Status.FAILED, Status.CANCELLED, Status.EXPIRED])
def test_a_job_that_never_ran_is_charged_nothing(
    db: Database, owner: Any, submit: Any, bill: Bill, expire_now: Any, status: Status
) -> None:
    job_id = submit()
    with db.transaction() as session:
        match status:
            case Status.CANCELLED:
                jobs.cancel(session, owner.tenant_id, job_id)
            case Status.FAILED:
                moves.move(session, [Move(job_id)], Status.FAILED)
    if status is Status.EXPIRED:
        expire_now(job_id)
        with db.transaction() as session:
            recovery.expire(session)
    with db.transaction() as session:
        job = jobs.find(session, owner.tenant_id, job_id)
    assert (job.status, usage_of(job)["total_tokens"]) == (status, 0)
    assert bill() == {(today(), "paid"): (1, 0, 0)}


def test_a_prompt_is_charged_once_however_many_attempts_computed_it(
    db: Database, owner: Any, submit: Any, new_worker: Any, bill: Bill
) -> None:
    job_id = submit()
    for text in ("ab", "cd"):
        worker = new_worker()
        claim = worker.take(job_id)
        worker.write(claim, text, claim.last_event + 1)
        worker.die()
        with db.transaction() as session:
            recovery.requeue_orphans(session, max_deaths=5)
    worker = new_worker()
    worker.finish(worker.take(job_id))
    assert bill() == {(today(), "paid"): (1, 2, 4)}


def test_a_dead_attempt_settles_nothing(db: Database, submit: Any, new_worker: Any, bill: Bill) -> None:
    job_id = submit()
    zombie, heir = new_worker(), new_worker()
    stale = zombie.take(job_id)
    zombie.die()
    with db.transaction() as session:
        recovery.requeue_orphans(session, max_deaths=5)
    claim = heir.take(job_id)
    assert zombie.finish(stale) == []
    heir.write(claim, "abc", claim.last_event + 1)
    heir.finish(claim)
    assert zombie.finish(stale) == []
    assert bill() == {(today(), "paid"): (1, 2, 3)}


def test_a_deleted_job_stays_on_the_bill(db: Database, owner: Any, submit: Any, worker: Any, bill: Bill) -> None:
    job_id = submit()
    worker.run(job_id, "abc")
    with db.transaction() as session:
        jobs.remove(session, owner.tenant_id, job_id)
    assert bill() == {(today(), "paid"): (1, 2, 3)}


def test_a_job_counts_on_the_day_of_its_submission(db: Database, submit: Any, worker: Any, bill: Bill) -> None:
    job_id = submit()
    with db.transaction() as session:
        long_ago = datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)
        session.execute(update(Job).where(Job.id == job_id).values(created_at=long_ago))
    worker.run(job_id, "a")
    assert bill() == {("2026-01-31", "paid"): (1, 2, 1)}
