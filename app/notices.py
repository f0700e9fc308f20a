"""Notices: what is told when work ends, to whom, and the deliveries that carry it.

A delivery is written in the transaction that ends the work, so that none tells of work that was rolled back: one to the
URL that the job or the batch names, and one to each of the tenant's endpoints that wants the event. Rows of a batch end
without a notice; their batch has one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.addresses import origin_of
from app.asked import RESPONSES, endpoint_of, response_id
from app.deliveries import GIVE_UP_S, MAX_ATTEMPTS
from app.ids import new_id
from app.settlements import usage_of
from app.tables import Batch, Delivery, Endpoint, Job

EVENT_TYPES = (
    "job.succeeded",
    "job.failed",
    "job.cancelled",
    "job.expired",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "response.completed",
    "response.failed",
    "response.cancelled",
    "response.incomplete",
)
"""All that is told. Those of batches and responses are OpenAI's own."""
FAMILIES = tuple(dict.fromkeys(f"{kind.split('.')[0]}.*" for kind in EVENT_TYPES))
"""All events of a kind of work: job.*, batch.*, response.*."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What is told of an end."""

    event_type: str
    data: Mapping[str, Any]
    """Its id names what has ended."""


def events_of(job: Job) -> list[Notice]:
    """All that the end of a job tells: its own event, and, of one that was asked for as a response, the response's."""
    told = [_job_ended(job)]
    if endpoint_of(job) == RESPONSES:
        told.append(_response_ended(job))
    return told


def _job_ended(job: Job) -> Notice:
    data = {
        "id": job.id,
        "object": "job",
        "status": job.status,
        "finish_reason": job.finish_reason,
        "usage": usage_of(job),
        "error": job.error,
        "metadata": job.job_metadata,
    }
    return Notice(f"job.{job.status}", data)


_RESPONSE_ENDS = {"succeeded": "completed", "failed": "failed", "cancelled": "cancelled", "expired": "failed"}
"""How a response ends by its job's status; one that was cut off at its most tokens is incomplete."""


def _response_ended(job: Job) -> Notice:
    end = "incomplete" if job.finish_reason == "length" and job.status == "succeeded" else _RESPONSE_ENDS[job.status]
    return Notice(f"response.{end}", {"id": response_id(job.id)})


def tell_of_jobs(session: Session, job_ids: Collection[str]) -> None:
    """Write the deliveries of jobs that have just ended."""
    if not job_ids:
        return
    query = select(Job).where(Job.id.in_(job_ids)).execution_options(populate_existing=True)
    ended = session.scalars(query).all()
    known = _enabled_endpoints(session, {job.tenant_id for job in ended if job.batch_id is None})
    for job in ended:
        assert job.finished_at is not None
        own, *others = events_of(job)
        letters = Letters(job.tenant_id, job.id, job.finished_at)
        if job.webhook_url is not None:
            session.add(letters.to_url(own, job.webhook_url))
        if job.batch_id is None:
            session.add_all(letters.to_endpoints([own, *others], known))
    session.flush()


def tell_of_batch(session: Session, batch: Batch, request_counts: Mapping[str, int], moment: datetime) -> None:
    """Write the deliveries of a batch that has just ended."""
    data = {
        "id": batch.id,
        "object": "batch",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "request_counts": dict(request_counts),
        "metadata": batch.batch_metadata,
    }
    notice, letters = Notice(f"batch.{batch.status}", data), Letters(batch.tenant_id, batch.id, moment)
    if batch.webhook_url is not None:
        session.add(letters.to_url(notice, batch.webhook_url))
    session.add_all(letters.to_endpoints([notice], _enabled_endpoints(session, {batch.tenant_id})))
    session.flush()


def sample(event_type: str) -> Notice:
    """What a test of an endpoint is told: an event of that type, of work that never was."""
    prefix = {"job": "job", "batch": "batch", "response": "resp"}[event_type.split(".")[0]]
    return Notice(event_type, {"id": new_id(prefix)})


def _enabled_endpoints(session: Session, tenant_ids: Collection[str]) -> Sequence[Endpoint]:
    if not tenant_ids:
        return []
    return session.scalars(select(Endpoint).where(Endpoint.tenant_id.in_(tenant_ids), Endpoint.enabled)).all()


def wants(endpoint: Endpoint, event_type: str) -> bool:
    """Whether an endpoint wants events of a type: it names the type, or all of its kind."""
    return event_type in endpoint.event_types or f"{event_type.split('.')[0]}.*" in endpoint.event_types


@dataclass(frozen=True, slots=True)
class Letters:
    """Makes the deliveries of one end."""

    tenant_id: str
    subject_id: str
    moment: datetime
    """When it ended."""

    def to_url(self, notice: Notice, url: str) -> Delivery:
        """To the URL that the job or the batch names."""
        return self._delivery(notice, url=url, receiver=origin_of(url))

    def to_endpoints(self, notices: Sequence[Notice], known: Sequence[Endpoint]) -> Iterator[Delivery]:
        """To each of the tenant's endpoints that wants it."""
        for notice in notices:
            for endpoint in known:
                if endpoint.tenant_id == self.tenant_id and wants(endpoint, notice.event_type):
                    yield self.to_endpoint(notice, endpoint)

    def to_endpoint(self, notice: Notice, endpoint: Endpoint) -> Delivery:
        delivery = self._delivery(notice, url=endpoint.url, receiver=endpoint.id)
        delivery.endpoint_id = endpoint.id
        return delivery

    def _delivery(self, notice: Notice, *, url: str, receiver: str) -> Delivery:
        """Its id is the webhook-id of every attempt; its body is what is signed."""
        delivery_id = new_id("evt")
        body = {
            "id": delivery_id,
            "object": "event",
            "type": notice.event_type,
            "created_at": int(self.moment.timestamp()),
            "timestamp": self.moment.isoformat(),
            "data": notice.data,
        }
        return Delivery(
            id=delivery_id,
            tenant_id=self.tenant_id,
            job_id=self.subject_id,
            event_type=notice.event_type,
            receiver=receiver,
            url=url,
            body=json.dumps(body, separators=(",", ":")),
            status="pending",
            attempts=0,
            last_attempt=MAX_ATTEMPTS,
            next_at=self.moment,
            give_up_at=self.moment + timedelta(seconds=GIVE_UP_S),
        )
