"""Webhooks: what is delivered when a job ends."""

from __future__ import annotations

import json
from datetime import datetime

from app.ids import new_id
from app.tables import Delivery, Job


def delivery_of(job: Job, moment: datetime) -> Delivery:
    """The delivery of a job that just ended. Its id is the webhook-id of every attempt; its body is what is signed."""
    assert job.webhook_url is not None
    delivery_id = new_id("evt")
    body = {
        "id": delivery_id,
        "object": "event",
        "type": f"job.{job.status}",
        "created_at": int(moment.timestamp()),
        "timestamp": moment.isoformat(),
        "data": {
            "id": job.id,
            "object": "job",
            "status": job.status,
            "finish_reason": job.finish_reason,
            "usage": {
                "prompt_tokens": job.prompt_tokens,
                "completion_tokens": job.completion_tokens,
                "total_tokens": job.prompt_tokens + job.completion_tokens,
            },
            "error": job.error,
            "metadata": job.job_metadata,
        },
    }
    return Delivery(
        id=delivery_id,
        tenant_id=job.tenant_id,
        job_id=job.id,
        url=job.webhook_url,
        body=json.dumps(body, separators=(",", ":")),
        status="pending",
        attempts=0,
        next_at=moment,
    )
