"""Who was served what lately: the shares of tiers and of tenants, and how even those of tenants are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.orm import Session

from app import line
from app.settlements import GENERATED_COST, PREFILLED_COST
from app.tiers import Tier

_SERVED = text(
    """
    with served as (
        select tenant_id, tier,
            coalesce(sum(prompt_tokens) filter (where started_at > since), 0)::bigint as prefilled,
            coalesce(sum(tokens), 0)::bigint as generated
        from (select statement_timestamp() - make_interval(secs => :window_s) as since) as window_
        cross join lateral (
            select id, tenant_id, tier, prompt_tokens, started_at from jobs
            where model = :model and status = 'running'
            union all
            select id, tenant_id, tier, prompt_tokens, started_at from jobs
            where model = :model and tier = any(:tiers) and finished_at > since
        ) as active
        cross join lateral (
            select sum(cardinality(token_ids)) as tokens from events
            where job_id = active.id and created_at > since
        ) as shown
        group by tenant_id, tier
    ), in_line as (
        select * from unnest(cast(:waiting_ids as text[]), cast(:waiting_tiers as text[])) as waiting (tenant_id, tier)
    )
    select tenants.id, tenants.name, tenants.weight, tier, coalesce(prefilled, 0) as prefilled,
        coalesce(generated, 0) as generated, in_line.tenant_id is not null as is_waiting
    from served full join in_line using (tenant_id, tier) join tenants on tenants.id = tenant_id
    where prefilled + generated > 0 or in_line.tenant_id is not null
    order by tier, tenants.id
    """
)


@dataclass(frozen=True, slots=True)
class Served:
    """What a tenant was served in a tier."""

    tenant_id: str
    name: str
    tier: Tier
    weight: float
    prefilled: int
    """Prompt tokens of its jobs that began."""
    generated: int
    is_waiting: bool
    """Jobs of it stand in line: it would take more."""

    @property
    def tokens(self) -> int:
        return self.prefilled + self.generated

    @property
    def fair_cost(self) -> float:
        """In virtual tokens over the weight: equal between tenants that were served fairly."""
        return (PREFILLED_COST * self.prefilled + GENERATED_COST * self.generated) / self.weight


def served(session: Session, model: str, *, window_s: float) -> Sequence[Served]:
    """What tenants were served in the last seconds, by jobs that run or have ended since, and who waits."""
    waiting = [(tenant_id, tier.value) for tier in Tier for tenant_id in line.who_waits(session, model, tier)]
    rows = session.execute(
        _SERVED,
        {
            "model": model,
            "window_s": window_s,
            "tiers": list(Tier),
            "waiting_ids": [tenant_id for tenant_id, _ in waiting],
            "waiting_tiers": [tier for _, tier in waiting],
        },
    )
    return [
        Served(row.id, row.name, Tier(row.tier), row.weight, row.prefilled, row.generated, row.is_waiting)
        for row in rows
    ]


def by_tier(served: Collection[Served]) -> dict[Tier, list[Served]]:
    return {tier: [each for each in served if each.tier is tier] for tier in Tier}


def tokens(served: Collection[Served]) -> int:
    return sum(each.tokens for each in served)


def share(part: int, whole: int) -> float:
    """Of tokens; 0 where there were none at all."""
    return part / whole if whole else 0.0


def fairness_index(tenants: Collection[Served]) -> float | None:
    """Jain's index of what those that wait were served, by weight: 1 where all had the same, 1/n where one had it all.

    None where fewer than two wait: a tenant that wants no more than it gets is not to be compared.
    Source: Jain, Chiu and Hawe, A quantitative measure of fairness, DEC-TR-301, 1984.
    """
    costs = [each.fair_cost for each in tenants if each.is_waiting]
    squares = sum(cost * cost for cost in costs)
    if len(costs) < 2 or not squares:
        return None
    return sum(costs) ** 2 / (len(costs) * squares)
