"""The whole service with the real model against its own bare engine: the same requests, model and machine, in turn.

A round runs the requests as jobs over REST: through Postgres, the broker, a worker, event rows and announcements, all
on the same cores. The service's time is the database's own, from the first job's creation to the last one's end; one
client follows a job's events meanwhile. Before the first round, and after each, the bare engine has the requests in a
process of its own. Machines change speed within minutes: a round is held against the mean of the bare runs before and
after it, in tokens per second, and in tokens per CPU-second, which other processes hardly disturb.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # inherited by the engine worker

from app.cli.demo.service import Service, service
from app.client import Client
from app.settings import get_settings
from benchmarks.engine import QUICK_OUTPUT, QUICK_REQUESTS, native_dtype, run_apart
from benchmarks.service.report import Bar, Quantity, over_rounds
from benchmarks.service.stack import ask, cpu_s
from benchmarks.workload import Item, make_workload

BARS = {"of_tokens_per_s": Bar(at_least=0.9), "of_tokens_per_cpu_s": Bar(at_least=0.95)}
"""Shares of the bare engine's."""
SUBMITTERS = 4
"""Threads that submit; more would only queue at the API."""
SLOTS = 64


@dataclass(frozen=True, slots=True)
class _Speed:
    tokens_per_s: float
    tokens_per_cpu_s: float


def measure(options: argparse.Namespace) -> Mapping[str, Quantity]:
    items = make_workload()
    if options.quick:
        items = [Item(item.prompt_ids, QUICK_OUTPUT) for item in items[:QUICK_REQUESTS]]
    asked = argparse.Namespace(threads=os.cpu_count(), dtype=native_dtype(), quick=options.quick)
    bare = [_run_bare(asked)]

    def against_bare() -> dict[str, float]:
        with service(get_settings().model_copy(update={"dtype": asked.dtype}), slots=SLOTS) as running:
            whole = _run_service(running, items)
        bare.append(_run_bare(asked))
        around = bare[-2:]
        return {
            "of_tokens_per_s": whole.tokens_per_s / statistics.mean(speed.tokens_per_s for speed in around),
            "of_tokens_per_cpu_s": whole.tokens_per_cpu_s / statistics.mean(speed.tokens_per_cpu_s for speed in around),
            "tokens_per_s": whole.tokens_per_s,
            "bare_tokens_per_s": bare[-1].tokens_per_s,
        }

    return over_rounds(options.rounds, against_bare, BARS)


def _run_service(running: Service, items: Sequence[Item]) -> _Speed:
    """Raises AssertionError when a request does not come out whole."""
    with Client(running.access.url, running.access.paid_key) as client, ThreadPoolExecutor(SUBMITTERS) as pool:
        _run(client, pool, [Item(item.prompt_ids[31::-1], 4) for item in items[:16]])  # warm, and no prefix to be found
        before = cpu_s(running)
        job_ids = _run(client, pool, items)
        spent = cpu_s(running).total() - before.total()
    row = ask(
        running,
        "select sum(completion_tokens) as tokens, extract(epoch from max(finished_at) - min(created_at)) as seconds"
        " from jobs where id = any(:ids) and status = 'succeeded'",
        ids=job_ids,
    )
    assert row.tokens == sum(item.max_tokens for item in items), "a job did not come out whole"
    return _Speed(row.tokens / float(row.seconds), row.tokens / spent)


def _run(client: Client, pool: ThreadPoolExecutor, items: Sequence[Item]) -> list[str]:
    """Submit the requests as jobs and wait for the end of each."""

    def submit(item: Item) -> str:
        job = client.submit(list(item.prompt_ids), max_tokens=item.max_tokens, temperature=0, ignore_eos=True)
        return job["id"]

    job_ids = list(pool.map(submit, items))
    # The longest first: when its stream has ended, most of the others have too, and their streams are replays.
    for job_id in sorted(job_ids, key=lambda job_id: -items[job_ids.index(job_id)].max_tokens):
        for _ in client.events(job_id):
            pass
    return job_ids


def _run_bare(options: argparse.Namespace) -> _Speed:
    """The bare engine, in a process of its own."""
    run = run_apart("everbatch", options)
    return _Speed(run.tokens_per_s, run.tokens_per_cpu_s)
