"""The tier table and admission: pure policy, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.errors import InvalidRequest


class Plan(StrEnum):
    """What a tenant bought."""

    PAID = "paid"
    FREE = "free"


class Tier(StrEnum):
    """The lane a job runs in."""

    PAID = "paid"
    FREE = "free"
    BULK = "bulk"


@dataclass(frozen=True, slots=True)
class TierPolicy:
    rank: int
    """0 goes first, and takes slots from higher ranks."""
    weight: float
    """Share of a backlogged worker's intake, relative to the other tiers."""
    overcommit: int
    """Jobs of this tier that a worker may hold beyond its slots, so that the engine has someone to preempt for."""
    lookahead: int
    """Jobs kept at the broker beyond the free slots, so that a worker need not wait for dispatch."""
    jobs_per_task: int
    """Jobs that one Celery message may name."""


POLICIES: dict[Tier, TierPolicy] = {
    Tier.PAID: TierPolicy(rank=0, weight=8.0, overcommit=8, lookahead=16, jobs_per_task=1),
    Tier.FREE: TierPolicy(rank=1, weight=4.0, overcommit=4, lookahead=8, jobs_per_task=1),
    Tier.BULK: TierPolicy(rank=2, weight=1.0, overcommit=0, lookahead=8, jobs_per_task=64),
}

SERVICE_TIERS = ("auto", "default", "flex")
"""What a submission may ask for: flex is the bulk tier, the others the plan's own."""


def admit(plan: Plan, service_tier: str | None) -> Tier:
    """The tier of a job: the plan's own, or bulk where the client asked for flex.

    Raises InvalidRequest for a service_tier that does not exist.
    """
    match service_tier:
        case None | "auto" | "default":
            return Tier(plan.value)
        case "flex":
            return Tier.BULK
    raise InvalidRequest(f"service_tier must be one of {', '.join(SERVICE_TIERS)}", param="service_tier")
