"""Jobs of one token, from the line to their terminal event: dispatch, broker, claim, engine, writes, announcements.

The jobs stand in line before the clock runs: between the first start and the last end by the database's clock, one
worker takes as many as it can. Paid jobs come one by one, rows of the bulk tier in messages of 64.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from app import jobs
from app.cli.demo.service import Service
from app.jobs import Submission
from app.tiers import Tier
from benchmarks.service.report import Bar, Quantity, over_rounds
from benchmarks.service.stack import ask, cpu_ms_per, cpu_s, echo_service, forget_jobs, prompt, wait_for

SLOTS = 256
"""So many that a message may name 64 rows."""
BARS = {"paid_jobs_per_s": Bar(at_least=500), "bulk_rows_per_s": Bar(at_least=2000)}


def measure(options: argparse.Namespace) -> Mapping[str, Quantity]:
    count = 300 if options.quick else 3000
    with echo_service(slots=SLOTS, step_ms=0) as running:
        run(running, Tier.BULK, 300)  # warm
        return over_rounds(
            options.rounds,
            lambda: {
                **{f"paid_jobs_{name}": value for name, value in run(running, Tier.PAID, count).items()},
                **{f"bulk_rows_{name}": value for name, value in run(running, Tier.BULK, 2 * count).items()},
            },
            BARS,
        )


def run(running: Service, tier: Tier, count: int) -> dict[str, float]:
    """Jobs per second, and what each cost."""
    forget_jobs(running)
    put_in_line(running, tier, count, max_tokens=1)
    before = cpu_s(running)
    wait_for(running, "(select count(*) from jobs where status = 'succeeded') = :count", count=count)
    row = ask(running, "select extract(epoch from max(finished_at) - min(started_at)) as seconds from jobs")
    return {"per_s": count / float(row.seconds), **cpu_ms_per(running, before, count)}


def put_in_line(running: Service, tier: Tier, count: int, *, max_tokens: int, model: str | None = None) -> list[str]:
    """Write jobs of the paying tenant in one transaction, as a batch's rows are written; their ids."""
    submission = Submission(
        tier=tier,
        model=model or running.model.name,
        model_revision=running.model.revision,
        prompt_ids=tuple(prompt(16)),
        sampling={"max_tokens": max_tokens, "seed": 1, "ignore_eos": True},
        deadline_s=3600.0,
        metadata={},
    )
    with running.database.transaction() as session:
        tenant_id = ask(running, "select id from tenants where plan = 'paid'").id
        return jobs.submit_rows(session, tenant_id, [submission] * count)
