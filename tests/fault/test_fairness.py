"""Three tiers and thirteen tenants on two real workers: who starts at once, who never starves, who gets how much."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text

from app import tables
from app.settlements import GENERATED_COST, PREFILLED_COST
from app.tiers import POLICIES, Tier
from engine.policies.tiered import FLOORS, WINDOW_S
from tests.site import Site

SLOTS = 8
"""Of each of two workers."""
PROMPT_TOKENS, MAX_TOKENS = 16, 40
"""Of every job, so that shares of generated tokens are shares of step tokens."""
BOUND = 2 * max(PREFILLED_COST * PROMPT_TOKENS, GENERATED_COST * 2 * SLOTS * (PROMPT_TOKENS + MAX_TOKENS))
"""By how much the service of two backlogged tenants may differ, in virtual tokens; of VTC, with both batches as one."""

_SERVICE = text(
    """
    select tenant_id, sum(case kind when 'running' then :prefilled else :generated * cardinality(token_ids) end)
    from events join jobs on jobs.id = job_id
    where tier = 'free' and kind in ('running', 'tokens') group by tenant_id
    """
)

_JOBS_THAT_PASSED = text(
    """
    select paid.id, (
        select count(*) from events join jobs on jobs.id = job_id
        where tier <> 'paid' and kind = 'running' and events.created_at between paid.created_at and first.started_at
    ) as passed
    from jobs as paid cross join lateral (
        select min(created_at) as started_at from events where job_id = paid.id and kind = 'tokens'
    ) as first
    where tier = 'paid'
    """
)

_LINES = text(
    "select tenant_id, count(*) from jobs where tier <> 'paid' and status = 'queued' and dispatch_number is null"
    " group by tenant_id"
)


@dataclass(frozen=True)
class Look:
    """What two workers have generated until a moment."""

    by_tier: Counter[str]
    by_worker: Counter[str]

    @classmethod
    def at(cls, workers: list[tables.Worker]) -> Look:
        by_tier: Counter[str] = Counter()
        by_worker: Counter[str] = Counter()
        for worker in workers:
            assert worker.metrics_url is not None
            for family in text_string_to_metric_families(httpx.get(worker.metrics_url, trust_env=False).text):
                for sample in family.samples:
                    if sample.name == "everbatch_generated_tokens_total":
                        by_tier[sample.labels["tier"]] += int(sample.value)
                        by_worker[worker.id] += int(sample.value)
        return cls(by_tier, by_worker)


def rows(site: Site, query: Any, **parameters: Any) -> dict[str, float]:
    with site.db.transaction() as session:
        return {key: float(value) for key, value in session.execute(query, parameters)}


def service(site: Site) -> dict[str, float]:
    """What each free tenant has been served, in virtual tokens."""
    return rows(site, _SERVICE, prefilled=PREFILLED_COST * PROMPT_TOKENS, generated=GENERATED_COST)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tiers_tenants_and_workers_get_what_they_were_promised(site: Site) -> None:
    bulk = site.new_tenant("bulk").tenant_id
    free = [site.new_tenant(f"free {n}").tenant_id for n in range(10)]
    paid = [site.new_tenant(f"paid {n}").tenant_id for n in range(2)]
    for tenant_id in free:
        site.submit(300, tier=Tier.FREE, tenant_id=tenant_id, max_tokens=MAX_TOKENS)
    site.submit(5000, tier=Tier.BULK, tenant_id=bulk, max_tokens=MAX_TOKENS)
    io = site.start_io()
    processes = [site.spawn_worker(number, max_num_seqs=SLOTS, echo_step_ms=5.0) for number in (1, 2)]
    site.wait_for(lambda: all(site.worker_of(process) for process in processes))
    workers = [worker for process in processes if (worker := site.worker_of(process)) is not None]

    before = Look.at(workers)
    site.wait_for(lambda: all((Look.at(workers).by_worker - before.by_worker)[worker.id] > 200 for worker in workers))
    first, served_first = Look.at(workers), service(site)
    started, of_paid = time.monotonic(), list[str]()
    served: dict[str, float] = {}
    # As long as a floor counts, and until tenants were served so much that a difference could break the bound.
    while time.monotonic() - started < WINDOW_S or min(served.values()) <= 1.5 * BOUND:
        for tenant_id in paid:
            of_paid += site.run(tenant_id=tenant_id, max_tokens=MAX_TOKENS)
        site.wait_until(of_paid, "succeeded")
        now = service(site)
        served = {tenant_id: now[tenant_id] - served_first[tenant_id] for tenant_id in free}
    last = Look.at(workers)
    lines = rows(site, _LINES)
    assert lines.keys() == {bulk, *free}, "all were backlogged to the end"
    for process in [*processes, io]:
        site.stop(process)

    # While a paid job waited, at most what was at the broker and what takes the slots once started.
    passed = rows(site, _JOBS_THAT_PASSED)
    at_broker = 2 * SLOTS + sum(POLICIES[tier].lookahead for tier in (Tier.FREE, Tier.BULK))
    assert len(passed) == len(of_paid) >= 10 and max(passed.values()) <= at_broker
    tokens = last.by_tier - first.by_tier
    for tier in (Tier.FREE, Tier.BULK):
        assert tokens[tier] >= FLOORS[POLICIES[tier].rank] * tokens.total()
    assert max(served.values()) - min(served.values()) <= BOUND
    one, other = (last.by_worker - first.by_worker).values()
    assert abs(one - other) <= 0.1 * (one + other)
