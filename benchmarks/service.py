"""The whole service against its own bare engine: the same requests, model and machine, in turn.

    python -m benchmarks.service [--rounds N] [--quick]

A round runs the requests as jobs over REST: through Postgres, the broker, a worker, event rows and announcements, all
on the same cores. The service's time is the database's own, from the first job's creation to the last one's end; one
client follows a job's events meanwhile. Before the first round, and after each, the bare engine has the requests in a
process of its own.

Prints a line per run, then one JSON object as its last line: tokens/s (medians) and the service's share of the bare
engine's, the median over the rounds. Machines change speed within minutes: a round is held against the mean of the bare
runs before and after it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # inherited by the engine worker

from sqlalchemy import text

from app.cli.demo.service import Service, service
from app.client import Client
from app.settings import get_settings
from benchmarks.engine import QUICK_OUTPUT, QUICK_REQUESTS, native_dtype, run_apart
from benchmarks.workload import Item, make_workload

BAR = 0.9
"""What the service's tokens/s are to be, at least, as a share of the bare engine's."""
SUBMITTERS = 4
"""Threads that submit; more would only queue at the API."""
SLOTS = 64


def run_service(running: Service, items: Sequence[Item]) -> float:
    """Seconds that the service takes for the requests. Raises AssertionError when one does not come out whole."""
    with Client(running.access.url, running.access.paid_key) as client, ThreadPoolExecutor(SUBMITTERS) as pool:
        _run(client, pool, [Item(item.prompt_ids[31::-1], 4) for item in items[:16]])  # warm, and no prefix to be found
        job_ids = _run(client, pool, items)
    with running.database.transaction() as session:
        row = session.execute(
            text(
                "select sum(completion_tokens) as tokens, extract(epoch from max(finished_at) - min(created_at)) as s"
                " from jobs where id = any(:ids) and status = 'succeeded'"
            ),
            {"ids": job_ids},
        ).one()
    assert row.tokens == sum(item.max_tokens for item in items), "a job did not come out whole"
    return float(row.s)


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


def _run_bare(options: argparse.Namespace) -> float:
    """Tokens/s of the bare engine."""
    tokens_per_s = run_apart("everbatch", options).tokens_per_s
    print(json.dumps({"bare": tokens_per_s}), flush=True)
    return tokens_per_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default=native_dtype())
    parser.add_argument("--quick", action="store_true", help="a smoke test: six requests of eight tokens")
    options = parser.parse_args()

    items = make_workload()
    if options.quick:
        items = [Item(item.prompt_ids, QUICK_OUTPUT) for item in items[:QUICK_REQUESTS]]
    tokens = sum(item.max_tokens for item in items)
    bare = [_run_bare(options)]
    whole: list[float] = []
    for _ in range(options.rounds):
        with service(get_settings().model_copy(update={"dtype": options.dtype}), slots=SLOTS) as running:
            whole.append(round(tokens / run_service(running, items), 1))
        print(json.dumps({"service": whole[-1]}), flush=True)
        bare.append(_run_bare(options))
    shares = [
        of_service / statistics.mean(around) for of_service, around in zip(whole, itertools.pairwise(bare), strict=True)
    ]
    share = statistics.median(shares)
    print(
        json.dumps(
            {
                "benchmark": "service",
                "rounds": options.rounds,
                "dtype": options.dtype,
                "bare_tokens_per_s": statistics.median(bare),
                "service_tokens_per_s": statistics.median(whole),
                "share": round(share, 3),
                "share_spread": [round(min(shares), 3), round(max(shares), 3)],
                "bar": BAR,
                "met": share >= BAR,
            }
        )
    )


if __name__ == "__main__":
    main()
