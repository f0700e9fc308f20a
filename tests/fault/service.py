"""A whole service to be hurt: its own servers, two engine workers, io and API, each behind proxies of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import redis
from sqlalchemy import make_url

from app import tenants
from app.children import end, free_port, spawn
from app.commands import PROJECT, api_command, engine_command, io_command
from app.db import Database, migrate
from app.embedded import Servers
from app.errors import SetupError
from app.settings import Settings, environment
from app.tiers import Plan
from app.vault import Vault
from engine.echo import write_model
from tests.fault.proxy import Proxy

RESTART_S = 0.5
"""What is dead starts again so much later."""


@dataclass
class Member:
    """A process of the service."""

    name: str
    command: list[str]
    settings: Settings
    postgres: Proxy
    redis: Proxy
    process: subprocess.Popen[bytes] | None = None
    dead_since: float | None = None

    @property
    def log(self) -> Path:
        return self.settings.home / f"{self.name}.log"

    def start(self) -> None:
        self.process = spawn(self.command, environment=environment(self.settings), cwd=PROJECT, log=self.log)
        self.dead_since = None

    def send(self, number: signal.Signals) -> None:
        """A signal, if there still is a process for it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def look_after(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            return
        self.dead_since = self.dead_since or time.monotonic()
        if time.monotonic() - self.dead_since >= RESTART_S:
            self.start()


@dataclass(frozen=True)
class Account:
    """A tenant with a key."""

    tenant_id: str
    plan: Plan
    key: str
    webhook_secret: str


@dataclass
class Service:
    """Used on the main thread: what it starts ends with the thread that started it."""

    servers: Servers
    settings: Settings
    database: Database
    """Past all proxies: what looks into the database is never hurt itself."""
    redis: redis.Redis
    accounts: list[Account]
    url: str
    members: dict[str, Member] = field(default_factory=dict)
    _servers_dead_since: float | None = None

    @classmethod
    def start(cls, home: Path) -> Service:
        base = Settings(home=home, database_url=None, redis_url=None)
        servers = Servers.start(base)
        migrate(servers.database_url)
        write_model(home / "models" / "echo")
        settings = base.model_copy(
            update={
                "model": "echo",
                "database_url": servers.database_url,
                "redis_url": servers.redis_url,
                "port": free_port(),
                "max_num_seqs": 16,
                "echo_step_ms": 15.0,
                "lease_s": 2.0,
                "heartbeat_s": 0.5,
                "sweep_interval_s": 0.5,
                "dispatch_interval_s": 0.5,
                "drain_s": 1.0,
                "watchdog_s": 10.0,
                "sse_heartbeat_s": 2.0,
                "webhook_allow_private": True,
                "webhook_timeout_s": 2.0,
            }
        )
        database = Database(servers.database_url, pool_size=8)
        with database.transaction() as session:
            accounts = [
                Account(made.tenant_id, plan, made.key, made.webhook_secret)
                for plan in (Plan.PAID, Plan.PAID, Plan.FREE, Plan.FREE)
                if (made := tenants.provision(session, Vault.open(settings), name=f"{plan}-{free_port()}", plan=plan))
            ]
        client = redis.Redis.from_url(servers.redis_url)
        service = cls(servers, settings, database, client, accounts, f"http://127.0.0.1:{settings.port}")
        for name, command in (
            ("engine1", engine_command(1)),
            ("engine2", engine_command(2)),
            ("io", io_command()),
            ("api", api_command(settings)),
        ):
            service.members[name] = service._member(name, command)
            service.members[name].start()
        return service

    @property
    def engines(self) -> list[Member]:
        return [self.members["engine1"], self.members["engine2"]]

    def tick(self) -> None:
        """Start again what is dead, as `everbatch up` would; then wait a moment."""
        if self.servers.poll():
            self._servers_dead_since = self._servers_dead_since or time.monotonic()
            if time.monotonic() - self._servers_dead_since >= RESTART_S:
                with contextlib.suppress(SetupError):  # what a killed server left behind is not gone yet
                    self.servers.restart_dead()
                    self._servers_dead_since = None
        for member in self.members.values():
            member.look_after()
        time.sleep(0.05)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def kill_server(self, name: str) -> None:
        server = {"postgres": self.servers.postgres, "valkey": self.servers.valkey}[name]
        assert server is not None
        if server.pid is not None:
            subprocess.run(["kill", "-9", str(server.pid)], check=True)

    def close(self) -> None:
        for member in self.members.values():
            member.send(signal.SIGCONT)
            member.send(signal.SIGTERM)  # all at once: each takes its time
        for member in self.members.values():
            assert member.process is not None
            end(member.process, by=signal.SIGTERM, timeout_s=10)
            member.postgres.close()
            member.redis.close()
        self.redis.close()
        self.database.close()
        self.servers.stop()

    def _member(self, name: str, command: list[str]) -> Member:
        assert self.settings.database_url and self.settings.redis_url
        assert self.servers.postgres is not None and self.servers.valkey is not None
        postgres, valkey = Proxy(self.servers.postgres.port), Proxy(self.servers.valkey.port)
        database_url = make_url(self.settings.database_url).set(port=postgres.port)
        settings = self.settings.model_copy(
            update={
                "database_url": database_url.render_as_string(hide_password=False),
                "redis_url": self.settings.redis_url.replace(f":{self.servers.valkey.port}/", f":{valkey.port}/"),
            }
        )
        return Member(name, command, settings, postgres, valkey)
