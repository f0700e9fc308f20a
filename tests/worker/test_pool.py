"""A real Celery worker process with the echo engine, on real Postgres and Valkey."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import func, select, update

from app import tables
from app.broker import GENERATE, celery_app, queue, queue_name
from app.db import Database, migrate
from app.tiers import Tier
from tests.site import Site
from worker.vital import BROKEN

SLOTS = 16


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[subprocess.Popen[bytes]]:
    """One worker for the tests that leave it alive."""
    process = site.start_worker()
    yield process
    assert site.stop(process) == 0


@pytest.fixture(scope="module")
def celery(site: Site) -> Iterator[Celery]:
    """The client side, to send messages that our own broker client would not."""
    assert site.settings.redis_url
    app = celery_app("test", site.settings.redis_url, [queue_name("echo", Tier.PAID)])
    yield app
    app.close()


@pytest.fixture
def send(celery: Celery) -> Callable[..., None]:
    def send(task: str = GENERATE, *, task_id: str | None = None, **options: Any) -> None:
        celery.send_task(task, queue=queue(queue_name("echo", Tier.PAID)), task_id=task_id, **options)

    return send


def number_of(site: Site, job_id: str) -> int:
    number = site.job(job_id).dispatch_number
    assert number is not None
    return number


pytestmark = pytest.mark.usefixtures("worker")


def test_a_job_goes_all_the_way_through(site: Site) -> None:
    (job_id,) = site.run()
    site.wait_until([job_id], "succeeded")
    site.check_succeeded(job_id)
    assert site.job(job_id).attempt == 1
    assert site.log(job_id).kinds[:3] == ["queued", "running", "tokens"]


def test_jobs_of_all_tiers_fill_the_batch_and_end(site: Site) -> None:
    job_ids = [*site.submit(30), *site.submit(30, tier=Tier.FREE), *site.submit(100, tier=Tier.BULK)]
    site.dispatch()  # a window of them; the worker has the rest dispatched as its slots become free
    site.wait_until(job_ids, "succeeded")
    for job_id in job_ids[::7]:
        site.check_succeeded(job_id)


def test_a_bulk_message_names_many_jobs(site: Site) -> None:
    job_ids = site.submit(24, tier=Tier.BULK)
    with site.db.transaction() as session:
        session.execute(
            update(tables.Job)
            .where(tables.Job.id.in_(job_ids))
            .values(dispatch_number=func.nextval("dispatch_numbers"), dispatched_at=tables.NOW)
        )
    site.broker.send_jobs("echo", Tier.BULK, [(job_id, number_of(site, job_id)) for job_id in job_ids])
    site.wait_until(job_ids, "succeeded")
    for job_id in job_ids:
        site.check_succeeded(job_id)


def test_duplicate_messages_run_a_job_once(site: Site) -> None:
    (job_id,) = site.run(max_tokens=100)
    for _ in range(10):
        site.broker.send_jobs("echo", Tier.PAID, [(job_id, 1)])
    site.wait_until([job_id], "succeeded")
    site.wait_for(lambda: site.broker.waiting("echo", Tier.PAID) == 0)
    (after,) = site.run()  # the queue is first in, first out: all duplicates have been looked at
    site.wait_until([after], "succeeded")
    site.check_succeeded(job_id)
    assert site.job(job_id).attempt == 1


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kwargs": {"jobs": []}},
        {"kwargs": {"jobs": "nonsense"}},
        {"kwargs": {"jobs": [["job_x", None]]}},
        {"kwargs": {"jobs": [["job_x", "one"]]}},
        {"kwargs": {"jobs": {"job_x": 1}}},
        {"kwargs": {"others": 1}},
        {"args": [1, 2, 3]},
        {"kwargs": {"jobs": [["job_that_does_not_exist", 1]]}},
        {"task": "everbatch.unknown"},
    ],
    ids=str,
)
def test_a_message_that_makes_no_sense_is_dropped_and_the_worker_goes_on(
    site: Site, send: Callable[..., None], message: dict[str, Any]
) -> None:
    send(**message)
    (job_id,) = site.run()
    site.wait_until([job_id], "succeeded")
    # Acknowledged: not left to come back for ever.
    site.wait_for(lambda: site.redis.hlen("unacked") == 0)


def test_a_job_that_the_engine_cannot_take_fails_alone(site: Site) -> None:
    (bad, good) = [*site.submit(nonsense=1), *site.submit()]
    site.dispatch()
    site.wait_until([bad], "failed")
    site.wait_until([good], "succeeded")
    error = site.job(bad).error
    assert error is not None and error["code"] == "engine_error"
    assert site.log(bad).kinds == ["queued", "running", "failed"]


def test_a_cancelled_queued_job_is_never_run(site: Site) -> None:
    (job_id,) = site.submit()
    site.cancel(job_id)
    site.broker.send_jobs("echo", Tier.PAID, [(job_id, 1)])
    (after,) = site.run()
    site.wait_until([after], "succeeded")
    assert site.log(job_id).kinds == ["queued", "cancelled"]


def test_a_running_job_shows_nothing_more_once_cancelled(site: Site) -> None:
    (job_id,) = site.run(max_tokens=5000)
    site.wait_for(lambda: "tokens" in site.log(job_id).kinds)
    site.cancel(job_id)
    kept = site.log(job_id)
    assert kept.kinds[-1] == "cancelled"
    site.wait_for(lambda: running_jobs(site) == 0)
    assert site.log(job_id) == kept
    assert site.job(job_id).output_text == kept.text


def test_a_job_that_waits_in_the_engine_is_cancelled_too(site: Site) -> None:
    running = site.run(SLOTS, max_tokens=5000)
    site.wait_until(running, "running")
    site.wait_for(lambda: stats(site)["running"] == SLOTS)
    (waiting,) = site.run(max_tokens=5000)
    site.wait_until([waiting], "running")  # claimed, beyond the slots
    site.cancel(waiting)
    site.wait_for(lambda: stats(site)["waiting"] == 0)
    assert site.log(waiting).kinds == ["queued", "running", "cancelled"]
    for job_id in running:
        site.cancel(job_id)
    site.wait_for(lambda: running_jobs(site) == 0)


def test_revoke_with_terminate_cancels_the_jobs_of_a_message(site: Site, celery: Celery) -> None:
    (job_id,) = site.submit(max_tokens=5000)
    site.dispatch()
    number = number_of_message(site, job_id)
    site.wait_for(lambda: "tokens" in site.log(job_id).kinds)
    celery.control.revoke(f"{job_id}:{number}", terminate=True)
    site.wait_until([job_id], "cancelled")
    assert site.job(job_id).output_text == site.log(job_id).text != ""
    site.wait_for(lambda: running_jobs(site) == 0)


@pytest.mark.parametrize("limit", ["soft_time_limit", "time_limit"])
def test_a_message_with_a_time_limit_fails_its_jobs_when_it_passes(
    site: Site, send: Callable[..., None], limit: str
) -> None:
    (job_id,) = site.submit(max_tokens=5000)
    send(kwargs={"jobs": [[job_id, 1]]}, **{limit: 0.2})
    site.wait_until([job_id], "failed")
    error = site.job(job_id).error
    assert error is not None and error["code"] == "time_limit"
    site.wait_for(lambda: stats(site)["messages"] == 0)


def test_stats_show_the_engine(site: Site) -> None:
    (paid,) = site.run(max_tokens=5000)
    (bulk,) = site.run(max_tokens=5000, tier=Tier.BULK)
    site.wait_until([paid, bulk], "running")
    site.wait_for(lambda: stats(site)["running"] == 2)
    shown = stats(site)
    assert shown["slots"] == SLOTS and shown["steps"] > 0 and shown["messages"] == 2
    assert shown["tiers"]["paid"] == shown["tiers"]["bulk"] == {"running": 1, "waiting": 0}
    for job_id in (paid, bulk):
        site.cancel(job_id)


def test_slots_cannot_be_changed_from_afar(site: Site, celery: Celery) -> None:
    (reply,) = celery.control.pool_grow(1, reply=True, timeout=10, limit=1)
    assert "EVERBATCH_MAX_NUM_SEQS" in str(reply)


def test_a_paid_job_takes_a_slot_from_bulk(site: Site) -> None:
    bulk = site.run(SLOTS, tier=Tier.BULK, max_tokens=5000)
    site.wait_for(lambda: stats(site)["tiers"]["bulk"]["running"] == SLOTS)
    (paid,) = site.run()
    site.wait_until([paid], "succeeded")
    assert site.statuses(bulk) == {"running": SLOTS}
    assert stats(site)["preemptions"] >= 1
    for job_id in bulk:
        site.cancel(job_id)


def test_the_worker_goes_on_after_the_broker_dropped_all_connections(site: Site) -> None:
    running = site.run(8, max_tokens=500)
    site.wait_until(running, "running")
    for _ in range(3):
        for client in site.redis.client_list():
            if client["name"] != "test" and int(client["id"]) != site.redis.client_id():
                site.redis.client_kill_filter(_id=client["id"])
        (job_id,) = site.run()
        site.wait_until([job_id], "succeeded")
    site.wait_until(running, "succeeded")
    for job_id in running:
        site.check_succeeded(job_id)
        assert site.job(job_id).attempt == 1, "nothing was run again"


def test_an_engine_that_hangs_ends_its_worker_and_its_jobs_go_on_elsewhere(site: Site) -> None:
    hanging = site.start_worker(2, echo_step_ms=60_000.0, watchdog_s=1.0)
    job_ids = site.submit(2 * SLOTS, max_tokens=400, ignore_eos=True)
    site.dispatch()
    site.wait_for(lambda: hanging.poll() is not None)
    assert hanging.returncode == BROKEN
    io = site.start_io()  # sweeps
    site.wait_until(job_ids, "succeeded")
    assert {site.job(job_id).attempt for job_id in job_ids} == {1, 2}
    assert site.stop(io) == 0


def test_a_worker_waits_for_the_tables_of_its_version(site: Site, empty_database: str) -> None:
    early = site.spawn_worker(3, database_url=empty_database)
    site.wait_for(lambda: "alembic upgrade head" in (site.settings.home / "engine3.log").read_text())
    migrate(empty_database)
    other = Database(empty_database)

    def is_registered() -> bool:
        with other.autocommit() as session:
            return session.scalar(select(tables.Worker.pid)) == early.pid

    site.wait_for(is_registered)
    other.close()
    assert site.stop(early) == 0


def running_jobs(site: Site) -> int:
    facts = stats(site)
    return int(facts["running"] + facts["waiting"])


def stats(site: Site) -> dict[str, Any]:
    """What `celery inspect stats` says of the pool of the one worker."""
    assert site.settings.redis_url
    app = celery_app("inspect", site.settings.redis_url, [])
    try:
        replies = app.control.inspect(timeout=5, limit=1).stats() or {}
    finally:
        app.close()
    (reply,) = replies.values()
    pool: dict[str, Any] = reply["pool"]
    return pool


def number_of_message(site: Site, job_id: str) -> int:
    """The dispatch number that the message of a job carried, claimed already or not."""
    with site.db.transaction() as session:
        number = session.scalar(
            select(func.coalesce(tables.Job.dispatch_number, tables.Job.claimed_number)).where(tables.Job.id == job_id)
        )
    assert number is not None
    return number
