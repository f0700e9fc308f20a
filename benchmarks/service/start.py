"""How soon a job starts: from the creation of its row to the commit of its first token, by the database's clock.

At light load, and as a paid job while long bulk jobs hold all slots and one of them has to give its own. A step takes
1 ms here, which is in the figures; so are the commits of submission, claim and first token.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

from sqlalchemy import text

from app.cli.demo.service import Service
from app.client import Client
from app.tiers import Tier
from benchmarks.service.noop import put_in_line
from benchmarks.service.report import Bar, Quantity, over_rounds, percentile
from benchmarks.service.stack import echo_service, forget_jobs, prompt, wait_for

SLOTS, STEP_MS = 16, 1.0
LONG = 8000
"""Tokens of a bulk job: more than are computed while it is looked at."""
EVERY_S = 0.05
BARS = {"light_p50_ms": Bar(at_most=15), "light_p99_ms": Bar(at_most=50), "paid_beside_bulk_p99_ms": Bar(at_most=25)}


def measure(options: argparse.Namespace) -> Mapping[str, Quantity]:
    count = 10 if options.quick else 100
    with (
        echo_service(slots=SLOTS, step_ms=STEP_MS) as running,
        Client(running.access.url, running.access.paid_key) as client,
    ):
        _waits(running, client, 10)  # warm
        return over_rounds(options.rounds, lambda: _round(running, client, count), BARS)


def _round(running: Service, client: Client, count: int) -> dict[str, float]:
    forget_jobs(running)
    light = _waits(running, client, count)
    put_in_line(running, Tier.BULK, 4 * SLOTS, max_tokens=LONG)
    wait_for(running, "(select count(*) from jobs where status = 'running' and tier = 'bulk') >= :slots", slots=SLOTS)
    busy = _waits(running, client, count)
    return {
        "light_p50_ms": percentile(light, 0.5),
        "light_p99_ms": percentile(light, 0.99),
        "paid_beside_bulk_p50_ms": percentile(busy, 0.5),
        "paid_beside_bulk_p99_ms": percentile(busy, 0.99),
    }


def _waits(running: Service, client: Client, count: int) -> list[float]:
    """Milliseconds until the first token of each of so many paid jobs, sent one after another."""
    job_ids = []
    for _ in range(count):
        job_ids.append(client.submit(prompt(16), max_tokens=4, ignore_eos=True)["id"])
        time.sleep(EVERY_S)
    wait_for(
        running,
        "(select count(*) from jobs where id = any(:ids) and status = 'succeeded') = :count",
        ids=job_ids,
        count=count,
    )
    with running.database.transaction() as session:
        rows = session.execute(
            text(
                "select extract(epoch from min(events.created_at) - jobs.created_at) as seconds"
                " from jobs join events on job_id = jobs.id and kind = 'tokens'"
                " where jobs.id = any(:ids) group by jobs.id"
            ),
            {"ids": job_ids},
        )
        return [1000 * float(row.seconds) for row in rows]
