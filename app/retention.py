"""How long jobs are kept once they have ended: the days of their tier."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.orm import Session

from app.tables import Batch
from app.tiers import Tier, TierTable

LIMIT = 500
"""Jobs removed in one transaction."""

_REMOVE = text(
    """
    with bygone as materialized (
        select id from jobs
        where finished_at < statement_timestamp() - make_interval(secs => :keep_s) and tier = :tier
        and not exists (select from batches where id = jobs.batch_id and status = any(:open))
        and not exists (
            select from parents join jobs as child on child.id = parents.job_id
            where parents.parent_id = jobs.id and child.status = 'queued'
        )
        and not exists (select from deliveries where job_id = jobs.id and status in ('pending', 'sending'))
        order by finished_at limit :limit
        for update skip locked
    ), keys as (
        delete from idempotency_records where job_id in (select id from bygone)
    ), posted as (
        delete from deliveries where job_id in (select id from bygone)
    )
    delete from jobs where id in (select id from bygone)
    """
)


def remove_bygone(session: Session, tiers: TierTable) -> int:
    """Remove up to LIMIT jobs whose days are over, with events, webhook logs and Idempotency-Keys; how many there were.

    Jobs of a batch that has not ended stay, those that others wait for, and those whose webhook has not been delivered
    or given up. What a job was charged stays for ever, and so do an ended batch's counts and files.
    """
    removed = 0
    for tier in Tier:
        asked = {
            "keep_s": tiers[tier].keep_days * 86_400,
            "tier": tier.value,
            "open": list(Batch.OPEN),
            "limit": LIMIT - removed,
        }
        removed += session.execute(_REMOVE, asked).rowcount  # type: ignore[attr-defined]
    return removed
