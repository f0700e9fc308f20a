"""A running service, and what its processes have cost so far."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import psutil
from psycopg.errors import DeadlockDetected
from sqlalchemy import Row, text
from sqlalchemy.exc import OperationalError

from app.children import wait_until
from app.cli.demo.service import Service, service
from app.settings import get_settings

PATIENCE_S = 120.0
"""For any one thing to happen."""
_TRIES = 10
"""For the line to be emptied while the service is at work."""
_ROLES = {
    "app.cli": "up",
    "gunicorn": "api",
    "worker.celery_app:io": "io",
    "worker.celery_app:engine": "engine",
    "postgres": "postgres",
    "valkey-server": "valkey",
}
"""What a process is, by a word of its command line."""


@contextmanager
def echo_service(*, slots: int, step_ms: float, **settings: Any) -> Iterator[Service]:
    """A service with the echo engine, whose steps take step_ms."""
    asked = {"model": "echo", "echo_step_ms": step_ms, "max_num_batched_tokens": max(256, slots), **settings}
    with service(get_settings().model_copy(update=asked), slots=slots) as running:
        yield running


def processes(running: Service) -> Mapping[str, list[psutil.Process]]:
    """All processes of the service, by role."""
    # The worker may have been killed meanwhile, and `up` is nobody's but ours.
    up = next(child for child in psutil.Process().children() if "app.cli" in child.cmdline())
    found: dict[str, list[psutil.Process]] = {}
    for process in [up, *up.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            role = next((role for word, role in _ROLES.items() if word in words), "other")
            found.setdefault(role, []).append(process)
    return found


def cpu_s(running: Service) -> Counter[str]:
    """CPU-seconds of the service so far, by role; those of processes that ended are with their parents."""
    spent: Counter[str] = Counter()
    for role, members in processes(running).items():
        for process in members:
            with suppress(psutil.NoSuchProcess):
                spent[role] += sum(process.cpu_times()[:4])  # type: ignore[assignment]
    return spent


def cpu_ms_per(running: Service, before: Counter[str], units: float) -> dict[str, float]:
    """CPU-milliseconds since before, per unit of work: by role, and in all."""
    spent = cpu_s(running)
    spent.subtract(before)
    by_role = {f"cpu_ms_{role}": 1000 * seconds / units for role, seconds in spent.items() if role != "up"}
    return {"cpu_ms": 1000 * spent.total() / units, **by_role}


def ask(running: Service, statement: str, **parameters: object) -> Row[Any]:
    """The first row that a statement returns; what it changes is committed."""
    with running.database.transaction() as session:
        return session.execute(text(statement), parameters).one()


def tell(running: Service, *statements: str) -> None:
    with running.database.transaction() as session:
        for statement in statements:
            session.execute(text(statement))


def forget_jobs(running: Service) -> None:
    """Empty the line, so that a round begins where the first one did.

    The service goes on meanwhile and locks the same tables in an order of its own: Postgres then ends one of the two
    transactions, and ours is the one that can simply begin again.
    """
    for _ in range(_TRIES):
        try:
            tell(running, "truncate jobs, events, settlements, idempotency_records, batches cascade")
            return
        except OperationalError as error:
            if not isinstance(error.orig, DeadlockDetected):
                raise
    raise AssertionError(f"deadlocked {_TRIES} times")


def wait_for(running: Service, condition: str, **parameters: object) -> None:
    """Wait until a condition in SQL holds."""
    query = f"select {condition} as holds"
    assert wait_until(lambda: bool(ask(running, query, **parameters).holds), PATIENCE_S), f"never: {condition}"


class Connection:
    """One HTTP connection that is kept alive; cheaper than a real client, for it shares the cores with the service."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self._reader = reader
        self._writer = writer
        self._key = key

    @classmethod
    async def open(cls, running: Service) -> Connection:
        address = urlsplit(running.access.url)
        return cls(*await asyncio.open_connection(address.hostname, address.port), running.access.paid_key)

    async def post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """The JSON object of the answer. Raises AssertionError for a refusal."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {self._key}\r\n"
        self._writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.split(b"content-length: ")[1].split(b"\r\n")[0])
        received = await self._reader.readexactly(length)
        assert answer.split()[1][:1] == b"2", received
        return dict(json.loads(received))

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def connect(running: Service, count: int) -> Sequence[Connection]:
    return [await Connection.open(running) for _ in range(count)]


def prompt(tokens: int) -> list[int]:
    """Token ids of the echo model."""
    return [97 + number % 26 for number in range(tokens)]
