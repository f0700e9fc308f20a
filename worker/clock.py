"""What happens by itself, in the io worker: rounds, each on a thread of its own, at its own interval."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis
from celery.bootsteps import StartStopStep
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from app import models, retention
from app.broker import Broker, BrokerError
from app.db import Database
from app.dispatch import Dispatcher, settle
from app.grammars import Grammars
from app.metrics import MetricsServer
from app.models import Model
from app.prompts import Prompts
from app.rows import Desk
from app.settings import Settings, get_settings
from app.shelf import Shelf
from app.vault import Vault
from worker import batches, programs, webhooks
from worker.batches import Clerk
from worker.consumer import ConsumerWatch
from worker.metrics import IoMetrics
from worker.programs import Usher
from worker.sweep import Sweeper
from worker.vital import end_process, vital_thread

logger = logging.getLogger(__name__)

POOL_SIZE = 16
"""Database connections of the process: one for each round and each sender of webhooks."""
SETTLEMENTS_INTERVAL_S = 1.0
DELIVERIES_INTERVAL_S = 0.5
BATCHES_INTERVAL_S = 0.5
PROGRAMS_INTERVAL_S = 0.2
STRAYS_INTERVAL_S = 3_600.0
RETENTION_INTERVAL_S = 60.0
JOIN_TIMEOUT_S = 5.0
"""A round under way at the end gets so long; it is a transaction, or a few, and can be cut anywhere."""


@dataclass(frozen=True, slots=True)
class Round:
    """Something done again and again. Errors of servers that are away are logged, and the next round tries again."""

    name: str
    interval_s: float
    """Seconds from the end of one to the start of the next."""
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Services:
    """What rounds and tasks of the io worker work with."""

    settings: Settings
    model: Model
    vault: Vault
    database: Database
    redis: redis.Redis
    broker: Broker
    dispatcher: Dispatcher
    watch: ConsumerWatch
    metrics: IoMetrics


@functools.cache
def services() -> Services:
    """The services of this process, opened at first use; no server is asked for anything yet."""
    settings = get_settings()
    assert settings.database_url and settings.redis_url
    model = models.describe(settings)
    database = Database(settings.database_url, pool_size=POOL_SIZE)
    broker = Broker(settings.redis_url)
    watch = ConsumerWatch(settings.redis_url, leave=end_process)
    return Services(
        settings=settings,
        model=model,
        vault=Vault.open(settings),
        database=database,
        redis=redis.Redis.from_url(settings.redis_url, socket_timeout=5, socket_connect_timeout=5),
        broker=broker,
        dispatcher=Dispatcher(database, broker, model.name, interval_s=settings.dispatch_interval_s),
        watch=watch,
        metrics=IoMetrics(lambda: watch.is_ready),
    )


def rounds(opened: Services) -> list[Round]:
    """All that happens by itself, beside the dispatcher's timer."""
    sweeper = Sweeper(
        opened.database,
        opened.redis,
        opened.broker,
        lease_s=opened.settings.lease_s,
        max_deaths=opened.settings.max_deaths,
        metrics=opened.metrics,
        on_requeued=opened.dispatcher.nudge,
    )
    shelf = Shelf(opened.settings)
    prompts = Prompts(opened.model)
    desk = Desk(opened.settings, opened.model, prompts, Grammars(opened.model))
    clerk = Clerk(opened.database, desk, shelf)
    usher = Usher(opened.database, opened.model, prompts, opened.settings.max_body_bytes)
    return [
        Round("sweep", opened.settings.sweep_interval_s, sweeper.sweep),
        Round("settlements", SETTLEMENTS_INTERVAL_S, lambda: settle(opened.database)),
        Round("deliveries", DELIVERIES_INTERVAL_S, lambda: webhooks.send_due(opened.database, opened.broker)),
        Round(
            "batches",
            BATCHES_INTERVAL_S,
            lambda: batches.advance_batches(clerk, opened.redis, nudge=opened.dispatcher.nudge),
        ),
        Round(
            "programs",
            PROGRAMS_INTERVAL_S,
            lambda: programs.advance_programs(usher, opened.redis, nudge=opened.dispatcher.nudge),
        ),
        Round("retention", RETENTION_INTERVAL_S, lambda: _remove_bygone(opened)),
        Round("strays", STRAYS_INTERVAL_S, lambda: batches.remove_strays(opened.database, shelf)),
    ]


def _remove_bygone(opened: Services) -> None:
    """Remove jobs and deliveries whose days are over, a transaction at a time, until there are none."""
    settings = opened.settings
    for remove in (
        functools.partial(retention.remove_bygone, tiers=settings.tiers),
        functools.partial(retention.remove_old_deliveries, keep_days=settings.webhook_keep_days),
    ):
        removed = retention.LIMIT
        while removed >= retention.LIMIT:
            with opened.database.transaction() as session:
                removed = remove(session)


class Clock:
    """Runs rounds from its making to `stop`."""

    def __init__(self, rounds: list[Round], metrics: IoMetrics) -> None:
        self._metrics = metrics
        self._stopped = threading.Event()
        self._threads = [vital_thread(each.name, functools.partial(self._repeat, each)) for each in rounds]

    def stop(self) -> None:
        """Start no further round; wait a while for those under way."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)

    def _repeat(self, each: Round) -> None:
        while True:
            try:
                each.run()
            except (SQLAlchemyError, RedisError, BrokerError, OSError) as error:
                self._metrics.failed_rounds.labels(each.name).inc()
                logger.warning("a round of %s failed, the next one tries again: %s", each.name, error)
            if self._stopped.wait(each.interval_s):
                return


class ClockStep(StartStopStep):  # type: ignore[misc]
    """Starts the clock with the io worker, and stops it before the worker's threads end."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._clock: Clock | None = None

    def start(self, parent: Any) -> None:
        opened = services()
        self._metrics_server = MetricsServer(
            opened.metrics.registry, opened.settings, is_ready=lambda: opened.watch.is_ready
        )
        self._clock = Clock(rounds(opened), opened.metrics)
        opened.watch.start()

    def stop(self, parent: Any) -> None:
        services().watch.close()
        if self._clock is not None:
            self._clock.stop()
            self._clock = None
            self._metrics_server.close()
        services().dispatcher.close()

    def terminate(self, parent: Any) -> None:
        self.stop(parent)
