"""Back in line after `kill -9`: from the kill of an engine worker to when the last of its jobs is queued again.

With the default lease and heartbeat. `resumed_s` is until each has shown a further token: `up` starts the worker anew.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Mapping

from app.cli.demo.service import Service
from app.tiers import Tier
from benchmarks.service.noop import put_in_line
from benchmarks.service.report import Bar, Quantity, over_rounds
from benchmarks.service.stack import ask, echo_service, forget_jobs, processes, wait_for

JOBS = 16
BARS = {"back_in_line_s": Bar(at_most=8.0)}


def measure(options: argparse.Namespace) -> Mapping[str, Quantity]:
    with echo_service(slots=JOBS, step_ms=20) as running:
        return over_rounds(options.rounds, lambda: _round(running), BARS)


def _round(running: Service) -> dict[str, float]:
    forget_jobs(running)
    put_in_line(running, Tier.PAID, JOBS, max_tokens=8000)
    wait_for(running, "(select count(distinct job_id) from events where kind = 'tokens') = :jobs", jobs=JOBS)
    (engine,) = processes(running)["engine"]
    killed_at = time.time()
    os.kill(engine.pid, signal.SIGKILL)
    wait_for(
        running, "(select count(distinct job_id) from events where number > 1 and kind = 'queued') = :jobs", jobs=JOBS
    )
    wait_for(
        running,
        "(select count(distinct shown.job_id) from events as shown join events as requeued using (job_id)"
        " where shown.kind = 'tokens' and requeued.kind = 'queued' and shown.number > requeued.number"
        " and requeued.number > 1) = :jobs",
        jobs=JOBS,
    )
    row = ask(
        running,
        "select extract(epoch from max(requeued)) as requeued, extract(epoch from max(shown)) as shown from ("
        " select job_id, max(created_at) filter (where kind = 'queued') as requeued,"
        " min(created_at) filter (where kind = 'tokens' and number > last_queued) as shown from ("
        "  select *, max(number) filter (where kind = 'queued') over (partition by job_id) as last_queued from events"
        " ) as numbered group by job_id) as logs",
    )
    return {"back_in_line_s": float(row.requeued) - killed_at, "resumed_s": float(row.shown) - killed_at}
