"""GET /v1/queue, and what a queued job says of its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, update

from app import dispatch
from app.broker import Broker
from app.db import Database
from app.tables import NOW, Job, Worker
from app.tiers import POLICIES, Plan, Tier
from tests import submitting

WINDOW = POLICIES[Tier.FREE].lookahead
"""Free jobs at the broker while no slot is free."""


@pytest.fixture(autouse=True)
def alone(db: Database) -> Iterator[None]:
    """Nobody else's jobs or workers."""
    with db.transaction() as session:
        session.execute(delete(Job))
        session.execute(delete(Worker))
    yield
    with db.transaction() as session:
        session.execute(update(Job).where(Job.status == "queued").values(status="cancelled", finished_at=NOW))
        session.execute(delete(Worker))


@pytest.fixture
def submit_free(db: Database, submission: Any) -> Callable[..., list[str]]:
    """Writes free jobs of a tenant, without nudging anybody."""

    def write(owner: Any, count: int) -> list[str]:
        with db.transaction() as session:
            wanted = dataclasses.replace(submission, tier=Tier.FREE)
            return [submitting.submit(session, owner.tenant_id, wanted, max_queued=1000)[0].id for _ in range(count)]

    return write


@pytest.fixture
def hand_out(db: Database, redis_url: str) -> Iterator[Callable[[], int]]:
    broker = Broker(redis_url)
    yield lambda: dispatch.dispatch(db, broker, "echo")
    broker.close()


def place(call: Any, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = call("GET", f"/v1/jobs/{job_id}").get_json()["queue"]
    return found


def test_without_a_worker_that_is_the_reason(call: Any, owner: Any, submit_free: Any) -> None:
    (job_id,) = submit_free(owner, 1)
    assert place(call, job_id) == {"position": 0, "estimated_start_at": None, "reason": "no_worker"}


def test_positions_count_own_jobs_and_those_of_others(
    call_as: Any, new_tenant: Any, submit_free: Any, hand_out: Any, worker: Any
) -> None:
    first, second = new_tenant(Plan.FREE), new_tenant(Plan.FREE)
    heavy = submit_free(first, 4 + WINDOW + 10)
    assert hand_out() == 4 + WINDOW  # a worker's free slots and a little more
    light = submit_free(second, 2)
    at_broker = 4 + WINDOW
    assert place(call_as(first), heavy[0])["reason"] == "dispatched"
    assert [place(call_as(first), job_id)["position"] for job_id in (heavy[0], heavy[at_broker - 1])] == [
        0,
        at_broker - 1,
    ]
    # They were lifted to the heavy tenant's place: of tenants that were served alike, the oldest job goes first.
    assert place(call_as(second), light[0])["position"] in (at_broker, at_broker + 1)
    assert place(call_as(second), light[1])["reason"] in ("share", "own_jobs")
    last = place(call_as(first), heavy[-1])
    assert (last["position"], last["reason"]) == (at_broker + 9 + 2, "share")


def test_the_estimate_follows_the_pace_of_late(
    call: Any, owner: Any, submit_free: Any, hand_out: Any, worker: Any, db: Database
) -> None:
    started = submit_free(owner, 10)
    hand_out()
    with db.transaction() as session:  # ten jobs started in the last ten seconds
        for number, job_id in enumerate(started):
            moment = datetime.now(UTC) - timedelta(seconds=10 - number)
            session.execute(
                update(Job)
                .where(Job.id == job_id)
                .values(status="succeeded", started_at=moment, claimed_number=number, dispatch_number=None)
            )
    waiting = submit_free(owner, 5)
    shown = place(call, waiting[-1])
    assert shown["position"] == 4
    in_s = (datetime.fromisoformat(shown["estimated_start_at"]) - datetime.now(UTC)).total_seconds()
    assert 3 < in_s < 6  # five starts at one per second


def test_a_job_that_does_not_wait_has_no_place(call: Any, submit_free: Any, owner: Any, worker: Any) -> None:
    (job_id,) = submit_free(owner, 1)
    worker.take(job_id)
    assert "queue" not in call("GET", f"/v1/jobs/{job_id}").get_json()


def test_the_queue_shows_each_tier(call: Any, owner: Any, submit_free: Any, worker: Any) -> None:
    job_ids = submit_free(owner, 3)
    worker.take(job_ids[0])
    answer = call("GET", "/v1/queue").get_json()
    assert (answer["object"], answer["model"], list(answer["tiers"])) == ("queue", "echo", ["paid", "free", "bulk"])
    free = answer["tiers"]["free"]
    assert (free["queued"], free["running"]) == (2, 1) and free["oldest_wait_s"] > 0
    assert answer["tiers"]["bulk"] == {"queued": 0, "running": 0, "oldest_wait_s": 0.0, "starts_per_s": 0.0}
