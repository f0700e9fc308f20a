"""Durable submissions over HTTP: one tenant, a few connections, each job committed to disk before its answer.

At its own pace (`jobs_per_s`): every connection sends its next job once it has the answer to the last. At a given rate
(`p50_ms`, `p99_ms`): jobs are due at even distances, and one that is sent late, because the service is, counts from
when it was due. There are two API processes; the engine worker stands still, so that the cores are for submissions
alone.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping

from app.cli.demo.service import Service
from app.tiers import TierTable
from benchmarks.service.report import Bar, Quantity, over_rounds, percentile
from benchmarks.service.stack import connect, cpu_ms_per, cpu_s, echo_service, forget_jobs, prompt

RATE = 300.0
"""Jobs per second."""
CONNECTIONS = 16
BARS = {"jobs_per_s": Bar(at_least=RATE), "p99_ms": Bar(at_most=60.0)}
BODY = {"prompt": prompt(64), "max_tokens": 16}


def measure(options: argparse.Namespace) -> Mapping[str, Quantity]:
    seconds = 1.0 if options.quick else 4.0
    tiers = TierTable()
    roomy = tiers.model_copy(update={"paid": tiers.paid.model_copy(update={"max_queued_jobs": 1_000_000})})
    with echo_service(slots=1, step_ms=60_000, tiers=roomy, api_workers=2) as running:
        asyncio.run(_at_own_pace(running, 1.0))  # warm
        return over_rounds(options.rounds, lambda: _round(running, seconds), BARS)


def _round(running: Service, seconds: float) -> dict[str, float]:
    forget_jobs(running)
    before = cpu_s(running)
    count = asyncio.run(_at_own_pace(running, seconds))
    costs = cpu_ms_per(running, before, count)
    forget_jobs(running)
    waits = asyncio.run(_at_rate(running, seconds))
    return {
        "jobs_per_s": count / seconds,
        "p50_ms": 1000 * percentile(waits, 0.5),
        "p99_ms": 1000 * percentile(waits, 0.99),
        **costs,
    }


async def _at_own_pace(running: Service, seconds: float) -> int:
    """How many jobs were accepted."""
    connections = await connect(running, CONNECTIONS)
    end = time.perf_counter() + seconds

    async def submit(number: int) -> int:
        count = 0
        while time.perf_counter() < end:
            await connections[number].post("/v1/jobs", BODY)
            count += 1
        return count

    counts = await asyncio.gather(*map(submit, range(CONNECTIONS)))
    for connection in connections:
        await connection.close()
    return sum(counts)


async def _at_rate(running: Service, seconds: float) -> list[float]:
    """Seconds from when each job was due to its answer."""
    connections = await connect(running, CONNECTIONS)
    idle: asyncio.Queue[int] = asyncio.Queue()
    for number in range(CONNECTIONS):
        idle.put_nowait(number)
    began = time.perf_counter()

    async def submit(number: int, due: float) -> float:
        await connections[number].post("/v1/jobs", BODY)
        idle.put_nowait(number)
        return time.perf_counter() - due

    sent = []
    for place in range(int(seconds * RATE)):
        due = began + place / RATE
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        sent.append(asyncio.create_task(submit(await idle.get(), due)))
    waits = await asyncio.gather(*sent)
    for connection in connections:
        await connection.close()
    return waits
