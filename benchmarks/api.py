"""The figures of the API, on one process of it, with the echo engine.

    python -m benchmarks.api [--only NAME ...] [--rounds N] [--quick]

crowd      1500 event streams of jobs that wait, in one process; how long other requests take meanwhile, and whether the
           one stream too many is refused
upload     200 MB in 50 000 lines through the stock OpenAI client; seconds, and how much the process grows meanwhile
token      from the claim of a job to its first token at a client that follows: the time of one step is in it
waiting    a completion that its client waits for, less the steps of its tokens

Prints one JSON object as its last line: of each quantity the median over the rounds with its spread, its bar, and
whether the bar was met.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import psutil
from sqlalchemy import text

from app.cli.demo.service import Service
from app.client import Client
from app.tiers import Tier
from benchmarks.service.noop import put_in_line
from benchmarks.service.report import Bar, Quantity, over_rounds, percentile
from benchmarks.service.stack import echo_service, forget_jobs, processes, prompt

STREAMS = 1500
REQUESTS = 200
"""Of other kinds, one after another."""
LINES, BYTES = 50_000, 200_000_000
TOKENS = 16
STEP_MS = 1.0
BARS = {
    "request_p99_ms": Bar(at_most=100),
    "too_many_refused": Bar(at_least=1),
    "upload_s": Bar(at_most=5.0),
    "upload_mib": Bar(at_most=150),
    "first_token_p50_ms": Bar(at_most=20),
    "first_token_p99_ms": Bar(at_most=60),
    "waiting_p50_ms": Bar(at_most=25),
}


def crowd(options: argparse.Namespace) -> Mapping[str, Quantity]:
    streams = 100 if options.quick else STREAMS
    with echo_service(slots=16, step_ms=STEP_MS, api_threads=streams + 32) as running, _client(running) as client:
        return over_rounds(options.rounds, lambda: _crowded(running, client, streams), BARS)


def _crowded(running: Service, client: Client, streams: int) -> dict[str, float]:
    forget_jobs(running)
    # Jobs of a model that no worker serves wait.
    job_ids = put_in_line(running, Tier.PAID, streams, max_tokens=1, model="later")
    with ExitStack() as opened:
        for job_id in job_ids:
            opened.enter_context(_stream(running, job_id))
        waits = [_seconds(partial(client.get, job_id)) for job_id in job_ids[:REQUESTS]]
        submits = [_seconds(lambda: client.submit(prompt(16), max_tokens=1)) for _ in range(REQUESTS // 4)]
        too_many = opened.enter_context(_stream(running, job_ids[0]))
        status = int(too_many.split()[1])
    return {
        "request_p50_ms": 1000 * percentile(waits, 0.5),
        "request_p99_ms": 1000 * percentile(waits + submits, 0.99),
        "too_many_refused": status == 503,
        "api_mib": _api(running).memory_info().rss / 2**20,
    }


@contextmanager
def _stream(running: Service, job_id: str) -> Iterator[bytes]:
    """Follow a job; the head of the answer, and the first event behind it."""
    address = urlsplit(running.access.url)
    with socket.create_connection((address.hostname, address.port or 80), timeout=60) as connection:
        head = f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: here\r\n"
        connection.sendall(f"{head}Authorization: Bearer {running.access.paid_key}\r\n\r\n".encode())
        received = b""
        while b"event: queued" not in received and b" 503 " not in received:
            received += connection.recv(4096)
        yield received


def upload(options: argparse.Namespace) -> Mapping[str, Quantity]:
    lines = LINES // 50 if options.quick else LINES
    with tempfile.TemporaryDirectory() as directory, echo_service(slots=1, step_ms=STEP_MS) as running:
        path = Path(directory) / "requests.jsonl"
        line = json.dumps({"custom_id": "x", "body": "y" * (BYTES // LINES - 40)}).encode()[: BYTES // LINES - 1]
        path.write_bytes((line + b"\n") * lines)
        return over_rounds(options.rounds, lambda: _uploaded(running, path), BARS)


def _uploaded(running: Service, path: Path) -> dict[str, float]:
    client = openai.OpenAI(base_url=f"{running.access.url}/v1", api_key=running.access.paid_key)
    api = _api(running)
    before = api.memory_info().rss
    with _greatest(lambda: api.memory_info().rss) as greatest, client:
        began = time.perf_counter()
        file = client.files.create(file=path, purpose="batch")
        seconds = time.perf_counter() - began
        client.files.delete(file.id)
    assert file.bytes == path.stat().st_size
    return {"upload_s": seconds, "upload_mib": (max(greatest) - before) / 2**20}


@contextmanager
def _greatest(look: Callable[[], float]) -> Iterator[list[float]]:
    """Notes what look returns, again and again, until the block ends."""
    seen = [look()]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            seen.append(look())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


def token(options: argparse.Namespace) -> Mapping[str, Quantity]:
    count = 10 if options.quick else 100
    with echo_service(slots=16, step_ms=STEP_MS) as running, _client(running) as client:
        _first_tokens(running, client, 10)  # warm
        return over_rounds(options.rounds, lambda: _first_tokens(running, client, count), BARS)


def _first_tokens(running: Service, client: Client, count: int) -> dict[str, float]:
    """The claim's event has the database's time, by the same clock as ours."""
    seen = {}
    for _ in range(count):
        job_id = client.submit(prompt(16), max_tokens=4)["id"]
        for event in client.events(job_id):
            if event.kind == "tokens":
                seen.setdefault(job_id, time.time())
    with running.database.transaction() as session:
        rows = session.execute(
            text(
                "select job_id, extract(epoch from created_at)::float8 as at from events"
                " where kind = 'running' and job_id = any(:ids)"
            ),
            {"ids": list(seen)},
        )
        delays = [seen[row.job_id] - row.at for row in rows]
    return {
        "first_token_p50_ms": 1000 * percentile(delays, 0.5),
        "first_token_p99_ms": 1000 * percentile(delays, 0.99),
    }


def waiting(options: argparse.Namespace) -> Mapping[str, Quantity]:
    count = 10 if options.quick else 100
    with echo_service(slots=16, step_ms=STEP_MS) as running:
        _waited(running, 10)  # warm
        return over_rounds(options.rounds, lambda: _waited(running, count), BARS)


def _waited(running: Service, count: int) -> dict[str, float]:
    body = {"model": running.model.name, "prompt": prompt(16), "max_tokens": TOKENS, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {running.access.paid_key}"}
    with httpx.Client(base_url=running.access.url, headers=headers, timeout=60, trust_env=False) as http:
        waits = [_seconds(lambda: http.post("/v1/completions", json=body).raise_for_status()) for _ in range(count)]
    overhead = [1000 * seconds - TOKENS * STEP_MS for seconds in waits]
    return {"waiting_p50_ms": percentile(overhead, 0.5), "waiting_p99_ms": percentile(overhead, 0.99)}


def _client(running: Service) -> Client:
    return Client(running.access.url, running.access.paid_key)


def _api(running: Service) -> psutil.Process:
    """The process that answers: the arbiter has none of the requests."""
    return max(processes(running)["api"], key=lambda process: process.memory_info().rss)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


FIGURES = {each.__name__: each for each in (crowd, upload, token, waiting)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.api", description="The figures of the API.")
    parser.add_argument("--only", nargs="+", choices=FIGURES, metavar="NAME", help=", ".join(FIGURES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a smoke test: one short round of each")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    found: dict[str, object] = {}
    for name in options.only or FIGURES:
        found[name] = {what: quantity.shown for what, quantity in FIGURES[name](options).items()}
        print(json.dumps({name: found[name]}), flush=True)
    print(json.dumps({"benchmark": "api", "rounds": options.rounds, "figures": found}))


if __name__ == "__main__":
    main()
