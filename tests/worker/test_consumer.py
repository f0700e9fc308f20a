"""Whether a consumer is well, as the watch sees it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry

from app.children import free_port, wait_until
from app.metrics import MetricsServer
from app.settings import Settings
from worker import consumer
from worker.consumer import ConsumerWatch, Consumption


class Watched:
    def __init__(self, redis_url: str) -> None:
        self.left = threading.Event()
        self.watch = ConsumerWatch(redis_url, leave=self.left.set)
        self.watch.TICK_S = 0.02  # type: ignore[misc]
        self.watch.start()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "READY_S", 0.3)
    monkeypatch.setattr(consumer, "LEAVE_S", 0.6)


@pytest.fixture
def hung(redis_url: str) -> Iterator[Watched]:
    watched = Watched(redis_url)
    yield watched
    watched.watch.close()


@pytest.fixture
def away() -> Iterator[Watched]:
    """Its Redis is not there."""
    watched = Watched(f"redis://127.0.0.1:{free_port()}/0")
    yield watched
    watched.watch.close()


def test_a_worker_leaves_when_redis_answers_and_its_consumer_does_not_ask(hung: Watched) -> None:
    assert wait_until(lambda: not hung.watch.is_ready, 10) and not hung.left.is_set(), "first it is not ready"
    assert hung.left.wait(10)


def test_while_redis_is_away_a_worker_stays_and_is_ready_again_when_its_consumer_turns(away: Watched) -> None:
    assert wait_until(lambda: not away.watch.is_ready, 10)
    assert not away.left.wait(1.0)
    Consumption.note_ask()
    Consumption.note_ask()
    assert wait_until(lambda: away.watch.is_ready, 10)


def test_a_broker_that_is_asked_again_late_has_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 1e9
    monkeypatch.setattr("worker.consumer.time.monotonic", lambda: moment)
    before = Consumption.turns
    Consumption.note_ask()
    for later_s, turns in [(4.1, 0), (0.1, 1), (1.0, 2), (4.0, 2)]:  # kombu gives a connection up after 4 s
        moment += later_s
        Consumption.note_ask()
        assert Consumption.turns - before == turns


def test_readiness_is_told_beside_the_metrics() -> None:
    is_ready = threading.Event()
    is_ready.set()
    server = MetricsServer(CollectorRegistry(), Settings(), is_ready=is_ready.is_set)
    assert server.url is not None
    probe = server.url.replace("/metrics", "/readyz")
    try:
        assert httpx.get(probe, trust_env=False).json() == {"status": "ready"}
        is_ready.clear()
        assert httpx.get(probe, trust_env=False).status_code == 503
        assert httpx.get(server.url, trust_env=False).status_code == 200
    finally:
        server.close()
