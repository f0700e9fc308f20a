"""Postgres and Valkey as child processes, for `everbatch up`, the demo and the tests.

They listen on loopback behind passwords, keep what they answered for, end with their parent however it ends, and
recover from `kill -9`. Nothing is installed and no user is made; several homes run side by side.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from app.children import free_port, is_free, wait_until
from app.embedded.postgres import Postgres, running_url
from app.embedded.valkey import Valkey
from app.errors import SetupError
from app.home import Home, HomeLock
from app.settings import Settings

_READY_TIMEOUT_S = 120.0
"""Crash recovery after a kill under full load takes seconds; a slow disk gets more."""
_PORT_CHOICES = 3


class Server(Protocol):
    """What the two servers have in common."""

    name: str
    port: int
    log: Path

    @property
    def url(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    def start(self) -> None: ...
    def answers(self) -> bool: ...
    def stop(self) -> None: ...


class Servers:
    """The database and the broker of one home: embedded, or the operator's own where the settings name them."""

    def __init__(self, settings: Settings) -> None:
        self.home = Home(settings.home)
        self._given = settings
        self._lock = HomeLock(self.home)
        self.postgres: Postgres | None = None
        self.valkey: Valkey | None = None

    @classmethod
    def start(cls, settings: Settings) -> Self:
        """Start what the settings do not name, and return once it answers.

        Call it from the main thread: the servers end with the thread that started them.
        Raises SetupError, in one line that says how to mend it; nothing is left running then.
        """
        servers = cls(settings)
        servers.home.create()
        servers._lock.acquire()
        try:
            servers._start_missing()
        except BaseException:
            servers.stop()
            raise
        return servers

    @property
    def database_url(self) -> str:
        return self._given.database_url or _url(self.postgres)

    @property
    def redis_url(self) -> str:
        return self._given.redis_url or _url(self.valkey)

    def poll(self) -> list[str]:
        """The names of servers whose process has ended."""
        return [server.name for server in self._embedded() if server.pid is None]

    def restart_dead(self) -> list[str]:
        """Start ended servers again, on their old ports, without waiting until they answer: clients try again anyway.

        Returns their names.
        """
        dead = [server for server in self._embedded() if server.pid is None]
        for server in dead:
            server.start()
        return [server.name for server in dead]

    def stop(self) -> None:
        """End the servers in good order and give the home free. Stopping twice is fine."""
        for server in reversed(self._embedded()):
            server.stop()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _embedded(self) -> list[Server]:
        return [server for server in (self.postgres, self.valkey) if server is not None]

    def _start_missing(self) -> None:
        if self._given.database_url is None:
            self.postgres = Postgres(self.home, free_port())
        if self._given.redis_url is None:
            self.valkey = Valkey(self.home, free_port())
        for server in self._embedded():
            server.start()
        for server in self._embedded():
            _wait_until_it_answers(server)


def running_database_url(settings: Settings) -> str:
    """The operator's own database, else that of the service which another process runs on the home.

    Raises SetupError when there is neither.
    """
    if settings.database_url is not None:
        return settings.database_url
    home = Home(settings.home)
    url = running_url(home) if HomeLock(home).is_held() else None
    if url is None:
        raise SetupError(
            f"No service runs on the home {home.path}: start `everbatch up`, name its home, "
            "or set EVERBATCH_DATABASE_URL"
        )
    return url


def _wait_until_it_answers(server: Server) -> None:
    """Between the choice of a free port and its use another process may take it: then choose again."""
    for _ in range(_PORT_CHOICES):
        try:
            if not wait_until(server.answers, _READY_TIMEOUT_S):
                raise SetupError(f"{server.name} runs but does not answer: see {server.log}")
            return
        except SetupError:
            if server.pid is not None or is_free(server.port):
                raise
        server.port = free_port()
        server.start()
    raise SetupError(f"{server.name} found no port that stayed free: see {server.log}")


def _url(server: Server | None) -> str:
    assert server is not None, "asked before start"
    return server.url
