"""The whole service over REST, as `everbatch up` runs it: one engine worker with the echo engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx

from app.cli.demo.readings import Reading, read_worker, worker_metrics_url
from app.client import Client
from app.db import Database
from app.embedded import running_database_url
from app.settings import Settings
from app.supervisor import Ready
from app.tiers import Tier

LONG = 3000
"""Tokens, and so steps, of a bulk job."""


def test_a_paid_job_starts_after_its_own_prefill_while_bulk_fills_every_slot(
    service: Ready, service_home: Path
) -> None:
    url = metrics_url(service_home)
    with Client(service.access.url, service.access.free_key) as free, paid_client(service) as paid:
        bulk = [free.submit("x", max_tokens=LONG, service_tier="flex")["id"] for _ in range(reading(url).slots)]
        try:
            before = wait_for(lambda: reading(url), lambda now: now.is_full and now.running[Tier.BULK] == now.slots)
            job = paid.submit("A paying customer's prompt", max_tokens=1)
            end = list(paid.events(job["id"]))[-1]
            after = reading(url)
            unfinished = [free.get(job_id)["status"] for job_id in bulk]
        finally:
            for job_id in bulk:
                free.cancel(job_id)
    assert end.kind == "succeeded"
    assert after.preemptions > before.preemptions
    assert set(unfinished) <= {"running", "queued"}, "no bulk job ended, so none made room"
    assert 0 < after.steps - before.steps < LONG / 4, "the paid job waited for steps of its own, not for a bulk job's"


def test_a_dropped_stream_goes_on_behind_any_event_and_joins_to_the_result(service: Ready) -> None:
    with paid_client(service) as paid:
        job = paid.submit("Once upon a time", max_tokens=40)
        whole = list(paid.events(job["id"]))
        result = paid.get(job["id"])
    assert [event.number for event in whole] == list(range(1, len(whole) + 1))
    for last_seen in range(len(whole)):
        seen = whole[:last_seen]
        with paid_client(service) as paid:
            rest = list(paid.events(job["id"], after=last_seen))
        text = "".join(event.data["text"] for event in seen + rest if event.kind == "tokens")
        assert text == result["output"]["choices"][0]["text"]


def paid_client(service: Ready) -> Client:
    return Client(service.access.url, service.access.paid_key)


def metrics_url(home: Path) -> str:
    """Where the engine worker answers with its metrics."""
    database = Database(running_database_url(Settings(home=home, database_url=None)))
    try:
        with database.transaction() as session:
            url = worker_metrics_url(session)
    finally:
        database.close()
    assert url is not None
    return url


def reading(url: str) -> Reading:
    return read_worker(url, time.monotonic())


def wait_for(take: Callable[[], Reading], wanted: Callable[[Reading], bool], *, timeout_s: float = 20) -> Reading:
    deadline = time.monotonic() + timeout_s
    while not wanted(now := take()):
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
    return now


def test_metrics_are_not_public(service: Ready) -> None:
    assert httpx.get(f"{service.access.url}/metrics", trust_env=False).status_code == 404
