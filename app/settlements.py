"""Settlements: what a job that ended is charged, once. Written by its terminal move, folded soon after.

To write a row beside the move costs nobody a wait; one tenant's jobs that all ended in the same row would stand in line
for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime

from sqlalchemy import text
from sqlalchemy.orm import Session

from app.tables import Job

PREFILLED_COST = 1.0
GENERATED_COST = 2.0
"""What a token counts, in virtual tokens: the engine's fair policy counts alike."""

FOLDED_AT_ONCE = 2000
"""Settlements in one statement."""

_FOLD = text(
    """
    with held as materialized (
        select tenant_id, day from quota_days
        where (tenant_id, day) in (select tenant_id, day from settlements where reserved_tokens > 0)
        for no key update skip locked
    ), settled as (
        delete from settlements
        where job_id in (
            select job_id from settlements
            where reserved_tokens = 0 or (tenant_id, day) in (select tenant_id, day from held)
            order by job_id limit :limit
            for update skip locked
        )
        returning tenant_id, day, model, tier, prompt_tokens, completion_tokens, charged_cost, charged_weight,
            reserved_tokens
    ), billed as (
        insert into usage_days (tenant_id, day, model, tier, jobs, prompt_tokens, completion_tokens)
        select tenant_id, day, model, tier, count(*), sum(prompt_tokens), sum(completion_tokens)
        from settled group by tenant_id, day, model, tier
        on conflict (tenant_id, day, model, tier) do update set
            jobs = usage_days.jobs + excluded.jobs,
            prompt_tokens = usage_days.prompt_tokens + excluded.prompt_tokens,
            completion_tokens = usage_days.completion_tokens + excluded.completion_tokens
    ), released as (
        update quota_days set used = used + used_tokens, reserved = reserved - released_tokens
        from (
            select tenant_id, day, sum(prompt_tokens + completion_tokens) as used_tokens,
                sum(reserved_tokens) as released_tokens
            from settled where reserved_tokens > 0 group by tenant_id, day
        ) as days where quota_days.tenant_id = days.tenant_id and quota_days.day = days.day
    ), corrected as (
        update token_counters set
            served = served + owed,
            mean_generated = coalesce(
                recent + (mean_generated - recent) * power(:memory, how_many), recent, mean_generated
            )
        from (
            select tenant_id, model, tier,
                sum(
                    (:prefilled_cost * prompt_tokens + :generated_cost * completion_tokens - charged_cost)
                    / coalesce(charged_weight, weight)
                ) as owed,
                avg(completion_tokens) filter (where completion_tokens > 0) as recent,
                count(*) filter (where completion_tokens > 0) as how_many
            from settled join tenants on tenants.id = tenant_id group by tenant_id, model, tier
        ) as sums
        where token_counters.tenant_id = sums.tenant_id
            and token_counters.model = sums.model and token_counters.tier = sums.tier
    )
    select count(*) from settled
    """
)

_WAIT_FOR_OLDEST = text(
    """
    select from quota_days where (tenant_id, day) = (
        select tenant_id, day from settlements where reserved_tokens > 0 order by job_id limit 1
    )
    for no key update
    """
)

_MEMORY = 0.9
"""How much of the mean length of a tenant's outputs one more output leaves."""


def day_of(moment: datetime) -> date:
    """The day on which a job that is submitted at that moment counts, in UTC."""
    return moment.astimezone(UTC).date()


def usage_of(job: Job) -> dict[str, int]:
    """Tokens that the job is charged: the prompt once, and what was persisted of its output.

    Nothing for a job that ended before an engine got it.
    """
    prompt_tokens = 0 if job.finished_at is not None and job.attempt == 0 else job.prompt_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": job.completion_tokens,
        "total_tokens": prompt_tokens + job.completion_tokens,
    }


CHARGED_PROMPT = "case when attempt = 0 then 0 else prompt_tokens end"
"""usage_of's prompt_tokens of a job that ended, in SQL."""

_SETTLE = text(
    f"""
    insert into settlements (
        job_id, tenant_id, day, model, tier, prompt_tokens, completion_tokens, charged_cost, charged_weight,
        reserved_tokens
    )
    select id, tenant_id, (created_at at time zone 'UTC')::date, model, tier, {CHARGED_PROMPT}, completion_tokens,
        coalesce(charged_cost, 0), charged_weight, reserved_tokens
    from jobs where id = any(:job_ids)
    """
)


def settle(session: Session, job_ids: Sequence[str]) -> None:
    """Write the settlements of jobs that have just ended."""
    session.execute(_SETTLE, {"job_ids": job_ids})


def fold(session: Session) -> int:
    """Add settlements to the days that are billed, and to the counters by which dispatch orders; how many there were.

    The caller holds dispatch's lock: counters have one writer at a time. Settlements of a quota of which a submission
    reserves at this moment are left for the next time: dispatch waits for no tenant.
    """
    folded = 0
    while True:
        count: int = session.execute(
            _FOLD,
            {
                "limit": FOLDED_AT_ONCE,
                "memory": _MEMORY,
                "prefilled_cost": PREFILLED_COST,
                "generated_cost": GENERATED_COST,
            },
        ).scalar_one()
        folded += count
        if count < FOLDED_AT_ONCE:
            return folded


def wait_for_oldest(session: Session) -> None:
    """Hold the quota that the oldest settlement is to free: a tenant may submit without pause, and keep it from fold.

    To be called before dispatch's lock is taken.
    """
    session.execute(_WAIT_FOR_OLDEST)
