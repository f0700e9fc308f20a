"""`everbatch up`: the embedded servers, the API, K engine workers and one io worker, kept alive by one process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import httpx
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from app import access, models, tenants
from app.access import Access
from app.children import end, free_port, is_free, last_line, spawn, wait_until
from app.commands import API_GRACE_S, CANNOT_START, PROJECT, api_command, engine_command, io_command
from app.db import Database, migrate, reason
from app.embedded import Servers
from app.errors import SetupError, Unauthenticated
from app.home import Home
from app.settings import Settings, environment
from app.tables import NOW, Worker
from app.tiers import Plan
from app.vault import Vault

_TICK_S = 0.1
_MARGIN_S = 5.0
"""Beyond its own limit, how long a child may take to end before it is killed."""


@dataclass
class Backoff:
    """How long an ended child waits for its next start: 0.5 s, 1 s, 2 s … 10 s; from 0.5 s again once it lived 30 s."""

    first_s: float = 0.5
    longest_s: float = 10.0
    settled_s: float = 30.0
    _next_s: float = field(default=0.5, init=False)

    def delay(self, lived_s: float) -> float:
        """The pause after a life of lived_s."""
        pause = self.first_s if lived_s >= self.settled_s else self._next_s
        self._next_s = min(self.longest_s, 2 * pause)
        return pause


@dataclass
class Child:
    """One supervised process, over all its lives."""

    name: str
    command: Sequence[str]
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float | None = None
    """When it is to be started again, on the monotonic clock; None while it runs."""
    backoff: Backoff = field(default_factory=Backoff)

    def start(self) -> None:
        self.process = spawn(self.command, environment=self.environment, cwd=PROJECT, log=self.log)
        self.started_at, self.start_at = time.monotonic(), None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.poll() is None else None


@dataclass(frozen=True)
class Ready:
    """What `up` tells once everything answers."""

    access: Access
    model: str
    worker_pids: list[int]
    """Of the engine workers."""


class Stopped(Exception):
    """SIGTERM or SIGINT came before everything was ready."""


class Supervisor:
    """Starts everything in order, starts again what dies, and ends everything in order.

    report takes one line for the operator at a time.
    """

    def __init__(self, settings: Settings, *, workers: int, report: Callable[[str], None]) -> None:
        self._home = Home(settings.home)
        port = settings.port or free_port(settings.host)
        self._settings = settings.model_copy(update={"port": port})
        self._num_workers = workers
        self._report = report
        self._signals = 0
        self._servers_backoff = Backoff()
        self._servers_started_at = 0.0
        self._servers_start_at: float | None = None
        self._api: list[Child] = []
        self._io: list[Child] = []
        self._engines: list[Child] = []

    def run(self, on_ready: Callable[[Ready], None]) -> None:
        """Run until SIGTERM or SIGINT. Call it from the main thread.

        Raises SetupError, after everything has ended, when something cannot start like this.
        """
        if not is_free(self._settings.port, self._settings.host):
            place = f"Port {self._settings.port} of {self._settings.host}"
            raise SetupError(f"{place} is taken: pass --port or set EVERBATCH_PORT, 0 for any")
        with self._signals_counted(), Servers.start(self._settings) as servers:
            try:
                self._run_on(servers, on_ready)
            except Stopped:
                self._report("Stopped before everything was ready")
            finally:
                self._stop_children()

    def _run_on(self, servers: Servers, on_ready: Callable[[Ready], None]) -> None:
        urls = {"database_url": servers.database_url, "redis_url": servers.redis_url}
        self._settings = self._settings.model_copy(update=urls)
        self._servers_started_at = time.monotonic()
        try:
            migrate(servers.database_url)
        except OperationalError as error:
            raise SetupError(f"The database of EVERBATCH_DATABASE_URL does not do this: {reason(error)}") from None
        self._prepare_model()
        model = models.describe(self._settings)
        database = Database(servers.database_url)
        try:
            granted = self._grant_access(database)
            self._start_children()
            while (pids := self._ready_engines(database, granted.url)) is None:
                self._tick(servers)
                if self._signals:
                    raise Stopped
        finally:
            database.close()
        on_ready(Ready(granted, model.name, pids))
        while not self._signals:
            self._tick(servers)
        self._report("Stopping")

    def _prepare_model(self) -> None:
        """Make the directory of a built-in model, in a process of its own: it takes torch, which we never import."""
        directory = models.directory_of(self._settings)
        if self._settings.model not in models.BUILT_IN or (directory / "config.json").exists():
            return
        self._report(f"Preparing the model {self._settings.model}, once for this home")
        log = self._home.log("prepare")
        directory.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "engine.models.prepare", self._settings.model, str(directory)]
        preparation = Child("prepare", command, log, environment(self._settings))
        preparation.start()
        assert preparation.process is not None
        while preparation.pid is not None:
            if self._signals:
                end(preparation.process, by=signal.SIGTERM, timeout_s=_MARGIN_S)
                raise Stopped
            time.sleep(_TICK_S)
        if preparation.process.returncode != 0:
            raise SetupError(f"The model {self._settings.model} cannot be prepared: {last_line(log)}")

    def _grant_access(self, database: Database) -> Access:
        host = "127.0.0.1" if self._settings.host == "0.0.0.0" else self._settings.host
        url = f"http://{host}:{self._settings.port}"
        with database.transaction() as session:
            granted = grant(session, Vault.open(self._settings), self._home, url=url)
        access.keep(self._home, granted)
        return granted

    def _start_children(self) -> None:
        self._api = [self._child("api", api_command(self._settings))]
        self._io = [self._child("io", io_command())]
        self._engines = [
            self._child(f"engine{number}", engine_command(number)) for number in range(1, self._num_workers + 1)
        ]
        for child in self._children():
            child.start()

    def _child(self, name: str, command: list[str]) -> Child:
        # PASSIVE: idle OpenMP threads sleep, and leave the cores to the other processes.
        variables = {**environment(self._settings), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
        return Child(name, command, self._home.log(name), variables)

    def _children(self) -> list[Child]:
        return [*self._api, *self._io, *self._engines]

    def _ready_engines(self, database: Database, url: str) -> list[int] | None:
        """The process ids of all engine workers once each has a live row (its model is loaded) and the API is ready."""
        pids = [engine.pid for engine in self._engines if engine.pid is not None]
        if len(pids) < self._num_workers or not _answers_ready(url):
            return None
        fresh = func.extract("epoch", NOW - Worker.heartbeat_at) < self._settings.lease_s
        try:
            with database.transaction() as session:
                alive = set(session.scalars(select(Worker.pid).where(Worker.dead.is_(False), fresh)))
        except OperationalError:  # it died in this moment, and will be started again
            return None
        return pids if alive.issuperset(pids) else None

    def _tick(self, servers: Servers) -> None:
        """Look after every process once, then wait a moment."""
        self._look_after_servers(servers)
        for child in self._children():
            self._look_after(child)
        time.sleep(_TICK_S)

    def _look_after_servers(self, servers: Servers) -> None:
        dead = servers.poll()
        if not dead:
            return
        now = time.monotonic()
        if self._servers_start_at is None:
            pause = self._servers_backoff.delay(now - self._servers_started_at)
            self._servers_start_at = now + pause
            self._report(f"{' and '.join(dead)} ended; starts again in {pause:g} s")
        elif now >= self._servers_start_at:
            self._servers_started_at, self._servers_start_at = now, None
            try:
                servers.restart_dead()
            except SetupError as error:  # what a killed server left behind is not gone yet: the next look tries again
                self._report(str(error))

    def _look_after(self, child: Child) -> None:
        """Raises SetupError when a new start would not help."""
        if child.pid is not None:
            return
        assert child.process is not None
        now = time.monotonic()
        if child.start_at is None:
            self._note_end(child, child.process.returncode, now)
        elif now >= child.start_at:
            child.start()

    def _note_end(self, child: Child, code: int, now: float) -> None:
        said = last_line(child.log)
        if code == CANNOT_START:
            raise SetupError(f"{child.name} cannot start: {said}")
        pause = child.backoff.delay(now - child.started_at)
        child.start_at = now + pause
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}: {said}"
        self._report(f"{child.name} {how}; starts again in {pause:g} s")

    def _stop_children(self) -> None:
        """Workers first, so that they can finish or hand back their jobs; then the API.

        A second signal cuts it short.
        """
        self._stop([*self._engines, *self._io], self._settings.drain_s + _MARGIN_S)
        self._stop(self._api, API_GRACE_S + _MARGIN_S)

    def _stop(self, children: Sequence[Child], timeout_s: float) -> None:
        running = [child.process for child in children if child.process is not None and child.pid is not None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        wait_until(lambda: self._signals > 1 or all(process.poll() is not None for process in running), timeout_s)
        for process in running:
            end(process, by=signal.SIGKILL, timeout_s=_MARGIN_S)

    @contextmanager
    def _signals_counted(self) -> Iterator[None]:
        """SIGTERM and SIGINT count, and end loops at their next look."""

        def count(number: int, frame: FrameType | None) -> None:
            self._signals += 1

        before = {number: signal.signal(number, count) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _answers_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def grant(session: Session, vault: Vault, home: Home, *, url: str) -> Access:
    """The access of the last start where its keys still open this database, else a new one; kept in the home's file.

    Write it down only after the transaction stands: see access.keep.
    """
    try:
        kept = replace(access.read(home), url=url)
        tenants.authenticate(session, kept.paid_key)
        tenants.authenticate(session, kept.free_key)
    except (SetupError, Unauthenticated):
        paid = tenants.provision(session, vault, name="paid", plan=Plan.PAID)
        free = tenants.provision(session, vault, name="free", plan=Plan.FREE, webhook_secret=paid.webhook_secret)
        return Access(url, paid.key, free.key, paid.webhook_secret)
    return kept
