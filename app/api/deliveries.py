"""/v1/deliveries, and the deliveries of a job or a batch: what was sent, when, and how it was answered."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from flask import Blueprint, Response, jsonify
from sqlalchemy.orm import Session

from app import batches, jobs, redeliveries
from app.api import shapes
from app.api.auth import authenticate, tenant
from app.api.operations import described
from app.api.pages import Page, asked_page, checked_id, listing, page_query
from app.api.services import services
from app.tables import Delivery, DeliveryAttempt

blueprint = Blueprint("deliveries", __name__, url_prefix="/v1")
blueprint.before_request(authenticate)

_PAGE = 20
_MAX_PAGE = 100
_QUERY = page_query("evt", max_limit=_MAX_PAGE)


@blueprint.get("/deliveries/<delivery_id>")
@described(answers={200: shapes.Delivery})
def read(delivery_id: str) -> Response:
    """What became of a delivery."""
    with services().database.autocommit() as session:
        found = redeliveries.find(session, tenant().id, checked_id("evt", delivery_id))
        return jsonify(delivery_object(found, redeliveries.attempts_of(session, [found.id])[found.id]))


@blueprint.post("/deliveries/<delivery_id>/redeliver")
@described(answers={200: shapes.Delivery})
def redeliver(delivery_id: str) -> Response:
    """Send it again, under the same id. A body is ignored."""
    with services().database.transaction() as session:
        found = redeliveries.redeliver(session, tenant().id, checked_id("evt", delivery_id))
        return jsonify(delivery_object(found, redeliveries.attempts_of(session, [found.id])[found.id]))


@blueprint.get("/jobs/<job_id>/deliveries")
@described(query=_QUERY, answers={200: shapes.Deliveries})
def of_job(job_id: str) -> Response:
    """What was told of a job."""
    with services().database.autocommit() as session:
        return _of_work(session, jobs.find(session, tenant().id, checked_id("job", job_id), with_output=False).id)


@blueprint.get("/batches/<batch_id>/deliveries")
@described(query=_QUERY, answers={200: shapes.Deliveries})
def of_batch(batch_id: str) -> Response:
    """What was told of a batch."""
    with services().database.autocommit() as session:
        return _of_work(session, batches.find(session, tenant().id, checked_id("batch", batch_id)).id)


def _of_work(session: Session, subject_id: str) -> Response:
    page = asked_page("evt", limit=_PAGE, max_limit=_MAX_PAGE)
    found = redeliveries.of_work(session, tenant().id, subject_id, after=page.after, limit=page.to_fetch)
    return log(session, found, page)


def log(session: Session, found: Sequence[Delivery], page: Page) -> Response:
    """A page of deliveries, each with its attempts."""
    attempts = redeliveries.attempts_of(session, [each.id for each in found])
    return listing(found, page, lambda each: delivery_object(each, attempts[each.id]))


def delivery_object(delivery: Delivery, attempts: Sequence[DeliveryAttempt]) -> dict[str, Any]:
    """A delivery as clients see it. Of what receivers answered only the status: a body may be of anybody inside."""
    return {
        "id": delivery.id,
        "object": "webhook_delivery",
        "event_type": delivery.event_type,
        "subject_id": delivery.job_id,
        "webhook_endpoint_id": delivery.endpoint_id,
        "url": delivery.url,
        "is_test": delivery.is_test,
        "status": delivery.status,
        "status_code": delivery.response_status,
        "error": delivery.error,
        "created_at": _time(delivery.created_at),
        "next_attempt_at": _time(delivery.next_at) if delivery.status == "pending" else None,
        "delivered_at": _time(delivery.delivered_at),
        "attempts": [_attempt_object(each) for each in attempts],
    }


def _attempt_object(attempt: DeliveryAttempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "started_at": _time(attempt.started_at),
        "ended_at": _time(attempt.ended_at),
        "status_code": attempt.response_status,
        "error": attempt.error,
    }


def _time(moment: datetime | None) -> str | None:
    """RFC 3339 in UTC, to the microsecond."""
    if moment is None:
        return None
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
