"""Jobs go when the days of their tier are over, and what is still needed stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, text, update

from app import batches, jobs, retention, settlements, usage
from app.batches import Status
from app.db import Database
from app.errors import NotFound
from app.jobs import Idempotency, Submission
from app.retention import remove_bygone
from app.tables import NOW, Batch, Delivery, Event, IdempotencyRecord, Job
from app.tiers import Tier, TierTable
from tests import submitting

TABLE = TierTable()


@pytest.fixture
def age(db: Database) -> Callable[..., None]:
    """Moves the ends of jobs so many days back."""

    def change(days: float, *job_ids: str) -> None:
        with db.transaction() as session:
            session.execute(
                update(Job).where(Job.id.in_(job_ids)).values(finished_at=Job.finished_at - timedelta(days=days))
            )

    return change


def remove(db: Database, tiers: TierTable = TABLE) -> int:
    with db.transaction() as session:
        return remove_bygone(session, tiers)


def kept(db: Database, job_ids: list[str]) -> list[str]:
    with db.transaction() as session:
        found = set(session.scalars(select(Job.id).where(Job.id.in_(job_ids))))
    return [job_id for job_id in job_ids if job_id in found]


def test_a_job_goes_with_its_events_key_and_webhook_log_and_stays_charged(
    db: Database, owner: Any, worker: Any, submission: Submission, age: Callable[..., None]
) -> None:
    key = Idempotency("key", b"fingerprint")
    with db.transaction() as session:
        job, _ = submitting.submit(session, owner.tenant_id, submission, max_queued=10, idempotency=key)
        job_id = job.id
    worker.run(job_id, "ab", "c")
    with db.transaction() as session:
        session.add(
            Delivery(
                id="evt_r1",
                tenant_id=owner.tenant_id,
                job_id=job_id,
                receiver="",
                event_type="",
                url="",
                body="",
                status="dead",
            )
        )
        settlements.fold(session)
    age(29.9, job_id)
    assert remove(db) == 0 and kept(db, [job_id])
    age(0.2, job_id)
    assert remove(db) == 1
    with db.transaction() as session:
        with pytest.raises(NotFound):
            jobs.find(session, owner.tenant_id, job_id)
        for table in (Event, Delivery, IdempotencyRecord):
            assert session.scalar(select(table).where(table.job_id == job_id)) is None
        today = session.execute(text("select (clock_timestamp() at time zone 'utc')::date")).scalar_one()
        (day,) = usage.usage(session, owner.tenant_id, today - timedelta(days=1), today)
        assert (day.jobs, day.completion_tokens) == (1, 3)
        again, is_new = submitting.submit(session, owner.tenant_id, submission, max_queued=10, idempotency=key)
        assert is_new and again.id != job_id


def test_each_tier_keeps_its_own_days(db: Database, worker: Any, submit: Any, age: Callable[..., None]) -> None:
    by_tier = {tier: submit(tier=tier) for tier in Tier}
    for job_id in by_tier.values():
        worker.run(job_id)
    age(2, *by_tier.values())
    days = {Tier.PAID: 3, Tier.FREE: 1, Tier.BULK: 2.5}
    remove(db, TierTable(**{tier.value: TABLE[tier].model_copy(update={"keep_days": days[tier]}) for tier in Tier}))
    assert kept(db, list(by_tier.values())) == [by_tier[Tier.PAID], by_tier[Tier.BULK]]


def test_what_has_not_ended_or_was_not_told_stays(
    db: Database, owner: Any, worker: Any, submit: Any, age: Callable[..., None]
) -> None:
    queued, untold = submit(), submit()
    worker.run(untold)
    with db.transaction() as session:
        session.add(
            Delivery(
                id="evt_r2",
                tenant_id=owner.tenant_id,
                job_id=untold,
                receiver="",
                event_type="",
                url="",
                body="",
                status="pending",
            )
        )
    age(31, queued, untold)
    remove(db)
    assert kept(db, [queued, untold]) == [queued, untold]


def test_rows_stay_until_their_batch_has_ended_and_its_counts_outlive_them(
    db: Database, owner: Any, worker: Any, submission: Submission, age: Callable[..., None]
) -> None:
    with db.transaction() as session:
        batch = Batch(
            id="batch_r1",
            tenant_id=owner.tenant_id,
            endpoint="/v1/completions",
            completion_window="24h",
            status="in_progress",
            input_file_id="file_none",
            total_rows=3,
            expires_at=NOW + timedelta(hours=24),
        )
        session.add(batch)
        session.flush()
        rows = [replace(submission, batch_id="batch_r1", row_number=number) for number in (1, 2)]
        job_ids = jobs.submit_rows(session, owner.tenant_id, rows)
    for job_id in job_ids:
        worker.run(job_id, "abc")
    age(31, *job_ids)
    remove(db)
    assert kept(db, job_ids) == job_ids
    with db.transaction() as session:
        batch = session.get_one(Batch, "batch_r1")
        batches.set_status(session, batch, Status.COMPLETED)
        before = batches.count(session, [batch])["batch_r1"]
    assert (before.total, before.completed, before.failed, before.completion_tokens) == (3, 2, 1, 6)
    remove(db)
    assert kept(db, job_ids) == []
    with db.transaction() as session:
        assert batches.count(session, [session.get_one(Batch, "batch_r1")])["batch_r1"] == before


def test_no_more_than_a_piece_goes_at_once(
    db: Database, worker: Any, submit: Any, age: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LIMIT", 2)
    remove(db)
    job_ids = [submit() for _ in range(3)]
    for job_id in job_ids:
        worker.run(job_id)
    age(31, *job_ids)
    assert [remove(db), remove(db), remove(db)] == [2, 1, 0]
