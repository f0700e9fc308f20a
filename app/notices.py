"""Notices: what is told when work ends, and the deliveries that carry it.

A delivery is written in the transaction that ends the work, so that none tells of work that was rolled back.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.ids import new_id
from app.settlements import usage_of
from app.tables import Batch, Delivery, Job


def deliver(session: Session, job_ids: Collection[str]) -> None:
    """Write the deliveries of jobs that have just ended and have a webhook."""
    if not job_ids:
        return
    ended = select(Job).where(Job.id.in_(job_ids)).execution_options(populate_existing=True)
    session.add_all([_delivery_of(job) for job in session.scalars(ended)])
    session.flush()


def _delivery_of(job: Job) -> Delivery:
    """Its id is the webhook-id of every attempt; its body is what is signed."""
    assert job.webhook_url is not None and job.finished_at is not None
    data = {
        "id": job.id,
        "object": "job",
        "status": job.status,
        "finish_reason": job.finish_reason,
        "usage": usage_of(job),
        "error": job.error,
        "metadata": job.job_metadata,
    }
    return _delivery(job.tenant_id, job.id, job.webhook_url, job.finished_at, kind=f"job.{job.status}", data=data)


def delivery_of_batch(batch: Batch, request_counts: Mapping[str, int], moment: datetime) -> Delivery:
    """The delivery of a batch that just ended."""
    assert batch.webhook_url is not None
    data = {
        "id": batch.id,
        "object": "batch",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "request_counts": dict(request_counts),
        "metadata": batch.batch_metadata,
    }
    return _delivery(batch.tenant_id, batch.id, batch.webhook_url, moment, kind=f"batch.{batch.status}", data=data)


def _delivery(
    tenant_id: str, subject_id: str, url: str, moment: datetime, *, kind: str, data: Mapping[str, Any]
) -> Delivery:
    delivery_id = new_id("evt")
    body = {
        "id": delivery_id,
        "object": "event",
        "type": kind,
        "created_at": int(moment.timestamp()),
        "timestamp": moment.isoformat(),
        "data": data,
    }
    return Delivery(
        id=delivery_id,
        tenant_id=tenant_id,
        job_id=subject_id,
        url=url,
        body=json.dumps(body, separators=(",", ":")),
        status="pending",
        attempts=0,
        next_at=moment,
    )
