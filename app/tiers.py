"""The tiers: what an operator sets for each, what is fixed, and admission. Pure policy, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from app.errors import Forbidden, InvalidRequest


class Plan(StrEnum):
    """What a tenant bought."""

    PAID = "paid"
    FREE = "free"


class Tier(StrEnum):
    """The lane a job runs in."""

    PAID = "paid"
    FREE = "free"
    BULK = "bulk"


class TierSettings(BaseModel):
    """What an operator sets for a tier."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    weight: float = Field(gt=0)
    """Share of a backlogged worker's intake, relative to the other tiers."""
    floor: float = Field(ge=0, le=0.5)
    """Share of the tokens computed in 10 s that the tier gets at least, while it has work for them."""
    max_queued_jobs: int = Field(ge=1)
    """Jobs of one tenant that may be queued, rows of batches not counted; at so many, submit answers 429."""
    max_tenant_slots: int | None = Field(default=None, ge=1)
    """Slots of a worker that one tenant may hold with jobs of the tier; none: all."""
    deadline_s: float = Field(gt=0, le=30 * 86_400)
    """A job's deadline when it names none, in seconds after its submission."""
    keep_days: float = Field(gt=0, le=36_500)
    """Days for which a job that has ended is kept, with its events and its webhook's log."""


class TierTable(BaseModel):
    """The tiers' settings, by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    paid: TierSettings = TierSettings(weight=8, floor=0, max_queued_jobs=10_000, deadline_s=86_400, keep_days=30)
    free: TierSettings = TierSettings(weight=4, floor=0.10, max_queued_jobs=10_000, deadline_s=86_400, keep_days=30)
    bulk: TierSettings = TierSettings(weight=1, floor=0.05, max_queued_jobs=10_000, deadline_s=86_400, keep_days=30)

    def __getitem__(self, tier: Tier) -> TierSettings:
        found: TierSettings = getattr(self, tier.value)
        return found


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """What is fixed for a tier."""

    rank: int
    """0 goes first, and takes slots from higher ranks."""
    overcommit: int
    """Jobs of this tier that a worker may hold beyond its slots, so that the engine has someone to preempt for."""
    lookahead: int
    """Jobs kept at the broker beyond the free slots, so that a worker need not wait for dispatch."""
    jobs_per_task: int
    """Jobs that one Celery message may name."""


POLICIES: dict[Tier, TierPolicy] = {
    Tier.PAID: TierPolicy(rank=0, overcommit=8, lookahead=16, jobs_per_task=1),
    Tier.FREE: TierPolicy(rank=1, overcommit=4, lookahead=8, jobs_per_task=1),
    Tier.BULK: TierPolicy(rank=2, overcommit=0, lookahead=8, jobs_per_task=64),
}

SERVICE_TIERS = ("auto", "default", "flex", "priority")
"""What a submission may ask for: flex is the bulk tier, priority the paid one, the others the plan's own."""


def admit(plan: Plan, service_tier: str | None) -> Tier:
    """The tier of a job: the plan's own, or bulk where the client asked for flex.

    Raises InvalidRequest for a service_tier that does not exist, and Forbidden for one that the plan does not have.
    """
    match service_tier:
        case None | "auto" | "default":
            return Tier(plan.value)
        case "flex":
            return Tier.BULK
        case "priority" if plan is Plan.PAID:
            return Tier.PAID
        case "priority":
            raise Forbidden("service_tier 'priority' needs the plan 'paid'", param="service_tier")
    raise InvalidRequest(f"service_tier must be one of {', '.join(SERVICE_TIERS)}", param="service_tier")
