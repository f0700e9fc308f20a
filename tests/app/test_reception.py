"""Submissions that come at once: one commit, and each its own answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import DataError

from app.children import wait_until
from app.db import Database
from app.errors import KeyReused, QueueFull, QuotaExceeded
from app.jobs import Idempotency, Submission, Submitted
from app.reception import Reception
from app.tables import IdempotencyRecord, Job, QuotaDay, Tenant
from app.tiers import Tier, TierTable

KEY = Idempotency("held", b"body")


@pytest.fixture
def reception(db: Database) -> Reception:
    tiers = TierTable()
    return Reception(db, tiers.model_copy(update={"paid": tiers.paid.model_copy(update={"max_queued_jobs": 5})}))


@pytest.fixture
def gathered(db: Database, owner: Any, submission: Submission, reception: Reception) -> Callable[..., Any]:
    """Has submissions gather behind one that cannot go on yet; the outcomes of all, that one's first."""

    @contextmanager
    def hold() -> Iterator[None]:
        with db.transaction() as session:  # somebody else binds the first one's key, and does not in the end
            session.add(IdempotencyRecord(tenant_id=owner.tenant_id, key=KEY.key, fingerprint=b"", job_id="job"))
            session.flush()
            yield
            session.rollback()

    def submit(*asked: tuple[Submission, Idempotency | None]) -> list[Submitted | Exception]:
        with ThreadPoolExecutor(len(asked) + 1) as pool:
            futures: list[Future[Submitted]] = []
            with hold():
                for number, (wanted, key) in enumerate([(submission, KEY), *asked]):
                    futures.append(pool.submit(reception.submit, owner.tenant_id, wanted, key))
                    assert wait_until(lambda: reception.waiting(owner.tenant_id, Tier.PAID) == number, 10)  # noqa: B023
            return [future.exception() or future.result() for future in futures]  # type: ignore[misc]

    return submit


def test_those_that_come_at_once_share_a_commit(gathered: Any, submission: Submission) -> None:
    first, *others = gathered(*[(submission, None)] * 4)
    moments = [each.job.created_at for each in others]
    assert len(set(moments)) == 1 and first.job.created_at < moments[0]
    assert len({each.job.id for each in (first, *others)}) == 5


def test_beyond_the_queues_limit_the_last_ones_are_refused_and_free_their_keys(
    db: Database, owner: Any, gathered: Any, reception: Reception, submission: Submission
) -> None:
    keys = [Idempotency(f"key {number}", b"body") for number in range(6)]
    outcomes = gathered(*[(submission, key) for key in keys])
    assert [isinstance(each, QueueFull) for each in outcomes] == [False] * 5 + [True] * 2
    with db.transaction() as session:
        bound = session.scalars(select(IdempotencyRecord.key).where(IdempotencyRecord.tenant_id == owner.tenant_id))
        assert set(bound) == {"held", "key 0", "key 1", "key 2", "key 3"}
    assert not reception.submit(owner.tenant_id, submission, keys[0]).is_new


def test_of_two_with_one_key_the_second_replays_the_first(gathered: Any, submission: Submission) -> None:
    key = Idempotency("same", b"body")
    _, one, other, two, wrong = gathered(
        (submission, key), (submission, None), (submission, key), (submission, Idempotency("same", b"other body"))
    )
    assert (one.is_new, other.is_new, two.is_new) == (True, True, False)
    assert one.job.id == two.job.id != other.job.id
    assert isinstance(wrong, KeyReused)


def test_a_quota_takes_those_that_fit(db: Database, owner: Any, gathered: Any, submission: Submission) -> None:
    with db.transaction() as session:
        session.get_one(Tenant, owner.tenant_id).tokens_per_day = 35
    large = dataclasses.replace(submission, prompt_ids=(1,) * 20)  # 28 tokens; the others take 10
    outcomes = gathered((submission, None), (large, None), (submission, None), (submission, None))
    assert [isinstance(each, QuotaExceeded) for each in outcomes] == [False, False, True, False, True]
    with db.transaction() as session:
        assert session.scalar(select(QuotaDay.reserved).where(QuotaDay.tenant_id == owner.tenant_id)) == 30


def test_one_that_the_database_refuses_takes_no_other_with_it(
    db: Database, owner: Any, gathered: Any, submission: Submission
) -> None:
    unstorable = dataclasses.replace(submission, metadata={"name": "a\0b"})
    outcomes = gathered((submission, None), (unstorable, None), (submission, None))
    assert [isinstance(each, DataError) for each in outcomes] == [False, False, True, False]
    with db.transaction() as session:
        written = set(session.scalars(select(Job.id).where(Job.tenant_id == owner.tenant_id)))
    assert written == {each.job.id for each in outcomes if isinstance(each, Submitted)}
