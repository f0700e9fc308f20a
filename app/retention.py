"""How long jobs are kept once they have ended, the days of their tier, and the log of webhooks."""

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


_REMOVE_DELIVERIES = text(
    """
    delete from deliveries where id in (
        select id from deliveries
        where status in ('delivered', 'dead')
        and created_at < statement_timestamp() - make_interval(secs => :keep_s)
        order by created_at limit :limit
        for update skip locked
    )
    """
)
_FORGET_RECEIVERS = text(
    """
    delete from receivers where failed_at < statement_timestamp() - make_interval(secs => :keep_s)
    and not exists (
        select from deliveries
        where deliveries.tenant_id = receivers.tenant_id and receiver = receivers.name
        and status in ('pending', 'sending')
    )
    """
)


def remove_old_deliveries(session: Session, keep_days: float) -> int:
    """Remove up to LIMIT deliveries that were written so many days ago and have ended; how many there were.

    Receivers that failed last, so long ago, and wait for nothing are forgotten.
    """
    keep_s = keep_days * 86_400
    session.execute(_FORGET_RECEIVERS, {"keep_s": keep_s})
    return int(session.execute(_REMOVE_DELIVERIES, {"keep_s": keep_s, "limit": LIMIT}).rowcount)  # type: ignore[attr-defined]
