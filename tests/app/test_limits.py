"""Quotas and rates: never more than was allowed, whoever asks at the same time and whatever the jobs' ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import exists, select, update

from app import dispatch, jobs, limits, recovery, settlements
from app.children import free_port
from app.db import Database
from app.errors import QuotaExceeded
from app.jobs import Idempotency, Submission
from app.limits import Rates
from app.tables import QuotaDay, Settlement, Tenant
from tests import submitting

MOST = 10
"""Tokens that a job of the test may use: a prompt of two and eight generated."""


@pytest.fixture
def allow(db: Database, owner: Any) -> Callable[[int | None], None]:
    """Gives the tenant a quota of tokens per day."""

    def change(tokens: int | None) -> None:
        with db.transaction() as session:
            session.execute(update(Tenant).where(Tenant.id == owner.tenant_id).values(tokens_per_day=tokens))

    return change


@pytest.fixture
def day(db: Database, owner: Any) -> Callable[[], tuple[int, int]]:
    """What the tenant has reserved and used today."""

    def read() -> tuple[int, int]:
        dispatch.settle(db)
        with db.transaction() as session:
            row = session.scalars(select(QuotaDay).where(QuotaDay.tenant_id == owner.tenant_id)).one()
            return row.reserved, row.used

    return read


def test_a_job_reserves_the_most_that_it_may_use_and_settles_what_it_used(
    submit: Any, worker: Any, allow: Any, day: Any
) -> None:
    allow(30)
    first, second = submit(), submit()
    assert day() == (2 * MOST, 0)
    worker.run(first, "abc")
    assert day() == (MOST, 5)
    submit()  # 5 used, 20 reserved
    with pytest.raises(QuotaExceeded):
        submit()
    worker.run(second, "abc")
    assert day() == (MOST, 10)
    submit()
    assert day() == (2 * MOST, 10)


def test_a_cancelled_job_gives_its_reservation_back(
    db: Database, owner: Any, submit: Any, allow: Any, day: Any
) -> None:
    allow(MOST)
    job_id = submit()
    with pytest.raises(QuotaExceeded):
        submit()
    with db.transaction() as session:
        jobs.cancel(session, owner.tenant_id, job_id)
    assert day() == (0, 0)
    submit()


def test_a_resume_keeps_the_reservation(db: Database, submit: Any, new_worker: Any, allow: Any, day: Any) -> None:
    allow(MOST)
    job_id = submit()
    worker = new_worker()
    claim = worker.take(job_id)
    worker.write(claim, "abc", claim.last_event + 1)
    worker.die()
    with db.transaction() as session:
        recovery.requeue_orphans(session, max_deaths=5)
    assert day() == (MOST, 0)
    heir = new_worker()
    heir.finish(heir.take(job_id))
    assert day() == (0, 5)


def test_fifty_at_once_never_reserve_more_than_the_quota(submit: Any, allow: Any, day: Any) -> None:
    allow(7 * MOST + 3)

    def one(_: int) -> bool:
        try:
            submit()
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(20) as pool:
        assert sum(pool.map(one, range(50))) == 7
    assert day() == (7 * MOST, 0)


def test_a_repeated_submission_reserves_once(
    db: Database, owner: Any, submission: Submission, allow: Any, day: Any
) -> None:
    allow(MOST)
    key = Idempotency("again", b"body")
    for _ in range(3):
        with db.transaction() as session:
            submitting.submit(session, owner.tenant_id, submission, max_queued=10, idempotency=key)
    assert day() == (MOST, 0)


def test_a_tenant_without_a_quota_reserves_nothing(
    db: Database, owner: Any, submit: Any, worker: Any, allow: Any
) -> None:
    job_id = submit()
    with db.transaction() as session:
        assert session.get(QuotaDay, (owner.tenant_id, datetime.now(UTC).date())) is None
        assert limits.room(session, owner.tenant_id, datetime.now(UTC).date()) is None
    allow(MOST)  # from now on; what was accepted before is not held against it
    worker.run(job_id, "abc")
    submit()


def test_what_was_accepted_without_a_quota_is_not_held_against_one(
    submit: Any, worker: Any, allow: Any, day: Any
) -> None:
    early = submit()
    allow(MOST)
    submit()
    worker.run(early, "abc")
    assert day() == (MOST, 0)


def test_a_lifted_quota_gives_back_what_was_reserved_of_it(submit: Any, worker: Any, allow: Any, day: Any) -> None:
    allow(MOST)
    reserved = submit()
    allow(None)
    free = submit()
    worker.run(free, "abc")
    worker.run(reserved, "a")
    assert day() == (0, 3)


def test_what_is_folded_waits_for_no_submission(
    db: Database, owner: Any, submit: Any, worker: Any, allow: Any, day: Any
) -> None:
    allow(3 * MOST)
    worker.run(submit(), "abc")
    with db.transaction() as submitting:
        assert limits.reserve(submitting, owner.tenant_id, datetime.now(UTC).date(), MOST)
        with db.transaction() as session:
            settlements.fold(session)
            assert session.scalar(select(exists().where(Settlement.tenant_id == owner.tenant_id))), "left for later"
    assert day() == (MOST, 5)


def test_rows_of_a_batch_reserve_together_or_not_at_all(
    db: Database, owner: Any, submission: Submission, allow: Any, day: Any
) -> None:
    allow(2 * MOST)
    rows = [dataclasses.replace(submission, row_number=number) for number in range(3)]
    with pytest.raises(QuotaExceeded), db.transaction() as session:
        jobs.submit_rows(session, owner.tenant_id, rows)
    with db.transaction() as session:
        jobs.submit_rows(session, owner.tenant_id, rows[:2])
    assert day() == (2 * MOST, 0)


def test_requests_beyond_the_rate_are_refused_until_the_minute_moves_on(redis_url: str, owner: Any) -> None:
    one, other = Rates(redis_url), Rates(redis_url)  # of two processes
    seen = [rates.hit(owner.tenant_id, 4) for rates in (one, other, one, other)]
    assert [rate.remaining for rate in seen] == [3, 2, 1, 0] and not any(rate.is_exceeded for rate in seen)
    refused = one.hit(owner.tenant_id, 4)
    assert refused.is_exceeded and 1 <= refused.reset_s <= 120
    assert not one.hit("somebody else", 4).is_exceeded


def test_without_redis_each_process_counts_for_itself() -> None:
    rates = Rates(f"redis://127.0.0.1:{free_port()}/0")
    assert [rates.hit("tenant", 2).is_exceeded for _ in range(3)] == [False, False, True]
