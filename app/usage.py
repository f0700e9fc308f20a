"""What a tenant's jobs were charged, by day, model and tier: what a seller bills from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from sqlalchemy import text
from sqlalchemy.orm import Session

_DAYS = text(
    """
    select day, model, tier, sum(jobs)::bigint as jobs, sum(prompt_tokens)::bigint as prompt_tokens,
        sum(completion_tokens)::bigint as completion_tokens
    from (
        select day, model, tier, jobs, prompt_tokens, completion_tokens from usage_days
        where tenant_id = :tenant_id and day between :first and :last
        union all
        select day, model, tier, 1, prompt_tokens, completion_tokens from settlements
        where tenant_id = :tenant_id and day between :first and :last
    ) as charged
    group by day, model, tier
    order by day, model, tier
    """
)
"""One statement, one snapshot: a settlement is seen where it was inserted or where it was folded, never twice."""


@dataclass(frozen=True, slots=True)
class Usage:
    day: date
    """The day, in UTC, on which the jobs were submitted."""
    model: str
    tier: str
    jobs: int
    """Jobs that have ended."""
    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def usage(session: Session, tenant_id: str, first: date, last: date) -> Sequence[Usage]:
    """The tenant's usage from the first day to the last, both included, the oldest first."""
    rows = session.execute(_DAYS, {"tenant_id": tenant_id, "first": first, "last": last})
    return [Usage(**row._mapping) for row in rows]
