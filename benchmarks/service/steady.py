"""Memory over a long run: 100 000 jobs of one token, and 200 streams that are opened, left and opened again.

Of each process the resident memory of the last quarter of the run against that of the first. Takes half an hour.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping

from app.cli.demo.service import Service
from app.client import Client
from app.tiers import Tier
from benchmarks.service.noop import put_in_line
from benchmarks.service.report import Quantity
from benchmarks.service.stack import echo_service, forget_jobs, processes, prompt, wait_for

JOBS, RECONNECTS = 100_000, 200
PARTS = 100
"""In each: a hundredth of the jobs, and a look at the memory."""
AT_MOST = 1.05
"""The last quarter's median over the first one's."""
WARM = 10
"""Parts before the first quarter begins: caches and pools fill."""
GROWING = ("api", "io", "engine", "up", "valkey")
"""Postgres has a fixed cache that fills, and counts it for each of its processes."""


def measure(options: argparse.Namespace) -> Mapping[str, Quantity]:
    parts, jobs = (4, 400) if options.quick else (PARTS, JOBS)
    warm = 0 if options.quick else WARM
    memory: dict[str, list[float]] = defaultdict(list)
    with (
        echo_service(slots=64, step_ms=0) as running,
        Client(running.access.url, running.access.paid_key) as client,
    ):
        for part in range(warm + parts):
            _run_part(running, client, jobs // parts, RECONNECTS // parts)
            if part >= warm:
                for role, mib in _memory(running).items():
                    memory[role].append(mib)
    quarter = parts // 4
    return {
        **{
            f"{role}_growth": Quantity(
                [statistics.median(values[-quarter:]) / statistics.median(values[:quarter])],
                at_most=AT_MOST if role in GROWING else None,
            )
            for role, values in memory.items()
        },
        **{f"{role}_mib": Quantity(values) for role, values in memory.items()},
    }


def _run_part(running: Service, client: Client, jobs: int, reconnects: int) -> None:
    forget_jobs(running)
    half = jobs // 2
    put_in_line(running, Tier.PAID, half, max_tokens=1)
    put_in_line(running, Tier.BULK, jobs - half, max_tokens=1)
    job_id = client.submit(prompt(16), max_tokens=8)["id"]
    for _ in range(reconnects):
        events = client.events(job_id)
        next(events)
        events.close()
    for _ in client.events(job_id):
        pass
    wait_for(running, "not exists (select from jobs where status in ('queued', 'running'))")


def _memory(running: Service) -> dict[str, float]:
    """MiB of resident memory, by role; of several processes of a role the sum."""
    return {
        role: sum(process.memory_info().rss for process in members) / 2**20
        for role, members in processes(running).items()
    }
