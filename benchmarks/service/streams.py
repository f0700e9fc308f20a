"""Event streams: 1000 clients, each following a job of its own, of which 250 run at once and show 10 events a second.

The delay is from the event's row (by the database's clock, on the same machine; its commit comes after) to the bytes
at the client. Every stream is checked for gaps. There are two API processes.
"""

from __future__ import annotations

import argparse
import re
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from urllib.parse import urlsplit

import psutil
from sqlalchemy import text

from app.cli.demo.service import Service
from app.tiers import Tier
from benchmarks.service.noop import put_in_line
from benchmarks.service.report import Bar, Quantity, over_rounds, percentile
from benchmarks.service.stack import PATIENCE_S, cpu_ms_per, cpu_s, echo_service, forget_jobs, processes, tell

CLIENTS, RUNNING = 1000, 250
STEP_MS = 100.0
TOKENS = 24
BARS = {
    "p99_ms": Bar(at_most=150),
    "redis_connections": Bar(at_most=2),
    "gaps": Bar(at_most=0),
}
_EVENT = re.compile(rb"id: (\d+)\nevent: (\w+)\n")


class _Stream:
    """One client's connection, and what came over it when."""

    def __init__(self, running: Service, job_id: str) -> None:
        address = urlsplit(running.access.url)
        self.job_id = job_id
        self.pieces: list[tuple[float, bytes]] = []
        self.socket = socket.create_connection((address.hostname, address.port or 80), timeout=PATIENCE_S)
        head = f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: here\r\n"
        self.socket.sendall(f"{head}Authorization: Bearer {running.access.paid_key}\r\n\r\n".encode())
        self.socket.setblocking(False)

    def read(self) -> None:
        self.pieces.append((time.time(), self.socket.recv(1 << 16)))

    def has_shown(self, *kinds: bytes) -> bool:
        """Whether an event of one of these kinds has come, the last of them not long ago."""
        latest = b"".join(piece for _, piece in self.pieces[-2:])
        return any(b"event: " + kind in latest for kind in kinds)

    def events(self) -> list[tuple[float, int]]:
        """Each event's number, with when it came. No event is cut by the end of a piece but where buffers were full."""
        found, rest = [], b""
        for at, piece in self.pieces:
            *blocks, rest = (rest + piece).split(b"\n\n")
            found += [(at, int(match[1])) for match in map(_EVENT.search, blocks) if match]
        return found


def measure(options: argparse.Namespace) -> Mapping[str, Quantity]:
    clients = CLIENTS // 10 if options.quick else CLIENTS
    with echo_service(slots=RUNNING, step_ms=STEP_MS, api_threads=CLIENTS + 64, api_workers=2) as running:
        return over_rounds(options.rounds, lambda: _round(running, clients), BARS)


def _round(running: Service, clients: int) -> dict[str, float]:
    forget_jobs(running)
    # Jobs of a model that no worker serves wait; all clients are connected before the first of them runs.
    job_ids = put_in_line(running, Tier.PAID, clients, max_tokens=TOKENS, model="later")
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        streams = [_Stream(running, job_id) for job_id in job_ids]
        for stream in streams:
            opened.callback(stream.socket.close)
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        _read(selector, streams, until=lambda stream: stream.has_shown(b"queued"))
        connections = _redis_connections(running)
        before = cpu_s(running)
        tell(running, f"update jobs set model = '{running.model.name}'")
        _read(selector, streams, until=lambda stream: stream.has_shown(b"succeeded"))
        costs = cpu_ms_per(running, before, clients * TOKENS)
    return _delays(running, streams) | {"redis_connections": connections} | costs


def _read(selector: selectors.BaseSelector, streams: Sequence[_Stream], *, until: Callable[[_Stream], bool]) -> None:
    """Note what comes, until the condition holds for each stream."""
    open_ = set(streams)
    give_up = time.monotonic() + PATIENCE_S
    while open_:
        assert time.monotonic() < give_up, f"{len(open_)} streams bring nothing"
        for key, _ in selector.select(1.0):
            key.data.read()
            if until(key.data):
                open_.discard(key.data)


def _delays(running: Service, streams: Sequence[_Stream]) -> dict[str, float]:
    with running.database.transaction() as session:
        rows = session.execute(
            text(
                "select job_id, number, extract(epoch from events.created_at)::float8 as at from events"
                " join jobs on jobs.id = job_id where kind = 'tokens'"
            )
        )
        written = {(row.job_id, row.number): row.at for row in rows}
    delays = []
    gaps = 0
    for stream in streams:
        received = stream.events()
        gaps += [number for _, number in received] != list(range(1, len(received) + 1))
        delays += [at - written[stream.job_id, number] for at, number in received if (stream.job_id, number) in written]
    seconds = max(written.values()) - min(written.values())
    return {
        "events_per_s": len(delays) / seconds,
        "p50_ms": 1000 * percentile(delays, 0.5),
        "p99_ms": 1000 * percentile(delays, 0.99),
        "gaps": gaps + (len(delays) != len(written)),
    }


def _redis_connections(running: Service) -> float:
    """The most that an API process holds."""
    (valkey,) = processes(running)["valkey"]
    port = next(each.laddr.port for each in valkey.net_connections() if each.status == psutil.CONN_LISTEN)
    return max(
        sum(each.raddr.port == port for each in process.net_connections() if each.raddr)
        for process in processes(running)["api"]
    )
