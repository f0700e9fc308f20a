"""What the routes work with, opened once per process."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import redis
from flask import Flask, current_app
from redis.backoff import NoBackoff
from redis.retry import Retry

from app import events, models
from app.api.metrics import Metrics
from app.api.streams import Streams
from app.broker import Broker
from app.db import Database
from app.dispatch import Dispatcher
from app.errors import SetupError
from app.events import Event, Hub
from app.grammars import Grammars
from app.limits import Rates
from app.metrics import MetricsServer
from app.models import Model
from app.prompts import Prompts
from app.reception import Reception
from app.settings import Settings
from app.vault import Vault

_POOL_SIZE = 16
"""Database connections of a process: streams hold none, and other requests hold one for milliseconds."""
_ANNOUNCE_TIMEOUT_S = 1
"""A request whose rows are committed waits so long, twice at most, for a Redis that does not answer."""
_EXTENSION = "everbatch"


@dataclass(frozen=True, slots=True)
class Services:
    settings: Settings
    model: Model
    prompts: Prompts
    grammars: Grammars
    vault: Vault
    database: Database
    redis: redis.Redis
    broker: Broker
    hub: Hub
    dispatcher: Dispatcher
    reception: Reception
    streams: Streams
    rates: Rates
    metrics: Metrics
    metrics_server: MetricsServer

    def publish(self, committed: list[Event]) -> None:
        """Tell followers of events, after their commit."""
        events.announce(self.redis, committed)

    def end_streams(self) -> None:
        """End open event streams at once and refuse new ones; their clients resume elsewhere."""
        self.streams.close()
        self.hub.release()

    def close(self) -> None:
        self.end_streams()
        self.metrics_server.close()
        self.grammars.close()
        self.dispatcher.close()
        self.hub.close()
        self.broker.close()
        self.redis.close()
        self.database.close()


class PerProcess:
    """Opens the services at their first use in each process: threads and connections do not survive a fork.

    What needs neither is read at once, so that a wrong set-up stops the start. Raises SetupError.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._model = models.describe(settings)
        self._prompts = Prompts(self._model)
        self._vault = Vault.open(settings)
        self._database_url = _needed(settings.database_url, "EVERBATCH_DATABASE_URL")
        self._redis_url = _needed(settings.redis_url, "EVERBATCH_REDIS_URL")
        self._lock = threading.Lock()
        self._opened: tuple[int, Services] | None = None

    def get(self) -> Services:
        opened = self._opened
        if opened is not None and opened[0] == os.getpid():
            return opened[1]
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = (os.getpid(), self._open())
            return self._opened[1]

    def close(self) -> None:
        """Close what this process opened."""
        with self._lock:
            if self._opened is not None and self._opened[0] == os.getpid():
                self._opened[1].close()
            self._opened = None

    def _open(self) -> Services:
        # One retry hides a connection that Redis had closed; more would keep a request waiting while Redis is away.
        client = redis.Redis.from_url(
            self._redis_url,
            socket_timeout=_ANNOUNCE_TIMEOUT_S,
            socket_connect_timeout=_ANNOUNCE_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),
        )
        database = Database(self._database_url, pool_size=_POOL_SIZE)
        broker = Broker(self._redis_url)
        streams = Streams(self.settings)
        counted = Metrics(database, self._model.name, lambda: streams.open)
        return Services(
            settings=self.settings,
            model=self._model,
            prompts=self._prompts,
            grammars=Grammars(self._model),
            vault=self._vault,
            database=database,
            redis=client,
            broker=broker,
            hub=Hub(client),
            dispatcher=Dispatcher(database, broker, self._model.name),
            reception=Reception(database, self.settings.tiers),
            streams=streams,
            rates=Rates(self._redis_url),
            metrics=counted,
            metrics_server=MetricsServer(counted.registry, self.settings),
        )


def _needed(url: str | None, variable: str) -> str:
    if url is None:
        raise SetupError(f"{variable} is not set: the API needs it, or start everything with `everbatch up`")
    return url


def install(app: Flask, settings: Settings) -> None:
    """Give an application its services. Raises SetupError."""
    app.extensions[_EXTENSION] = PerProcess(settings)


def services_of(app: Flask) -> PerProcess:
    """What opens the application's services in this process."""
    holder: PerProcess = app.extensions[_EXTENSION]
    return holder


def services() -> Services:
    """The services of the current request's application."""
    return services_of(current_app).get()
