"""The log of deliveries as tenants read it, and deliveries that they ask for: again, or as a test."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field
from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import Session

from app import db, endpoints, receivers, submissions, tables
from app.bodies import Body
from app.deliveries import GIVE_UP_S, MAX_ATTEMPTS
from app.errors import Conflict, InvalidRequest, NotFound
from app.notices import EVENT_TYPES, Letters, sample
from app.tables import Delivery, DeliveryAttempt, Endpoint

MAX_REDELIVERIES = 10_000
"""Deliveries that one request asks for again; what is older waits for the next request."""
Moment = Annotated[AwareDatetime, Field(strict=False)]


class Range(Body):
    """The body of POST /v1/webhook_endpoints/{id}/redeliver: what was written from since on and before until."""

    since: Moment
    until: Moment | None = None
    status: Literal["delivered", "dead"] | None = None
    """Only those that ended so. Default: dead and delivered."""


class Trial(Body):
    """The body of POST /v1/webhook_endpoints/{id}/test."""

    event_type: str


def of_endpoint(session: Session, endpoint: Endpoint, *, after: str | None, limit: int) -> list[Delivery]:
    """The endpoint's deliveries, newest first, from behind the delivery id after, at most limit of them."""
    return _page(session, Delivery.endpoint_id == endpoint.id, after, limit)


def of_work(session: Session, tenant_id: str, subject_id: str, *, after: str | None, limit: int) -> list[Delivery]:
    """The deliveries of a job or a batch, the same way."""
    mine = (Delivery.job_id == subject_id) & (Delivery.tenant_id == tenant_id)
    return _page(session, mine, after, limit)


def _page(session: Session, which: ColumnElement[bool], after: str | None, limit: int) -> list[Delivery]:
    query = select(Delivery).where(which)
    if after is not None:
        query = query.where(Delivery.id < after)
    return list(session.scalars(query.order_by(Delivery.id.desc()).limit(limit)))


def attempts_of(session: Session, delivery_ids: Collection[str]) -> Mapping[str, Sequence[DeliveryAttempt]]:
    """The attempts of each delivery, in their order."""
    found: dict[str, list[DeliveryAttempt]] = {delivery_id: [] for delivery_id in delivery_ids}
    query = select(DeliveryAttempt).where(DeliveryAttempt.delivery_id.in_(delivery_ids))
    for attempt in session.scalars(query.order_by(DeliveryAttempt.delivery_id, DeliveryAttempt.number)):
        found[attempt.delivery_id].append(attempt)
    return found


def find(session: Session, tenant_id: str, delivery_id: str, *, for_update: bool = False) -> Delivery:
    """The tenant's delivery. Raises NotFound; somebody else's looks the same as none."""
    query = select(Delivery).where(Delivery.id == delivery_id, Delivery.tenant_id == tenant_id)
    query = query.execution_options(populate_existing=True)
    delivery = session.scalar(query.with_for_update() if for_update else query)
    if delivery is None:
        raise NotFound(f"There is no delivery '{delivery_id}'", param="id")
    return delivery


def redeliver(session: Session, tenant_id: str, delivery_id: str) -> Delivery:
    """Make a delivery due now, with its id, its body and all its attempts before it again.

    Raises NotFound, and Conflict while it is being sent, and where its endpoint is gone or disabled.
    """
    delivery = find(session, tenant_id, delivery_id, for_update=True)
    if delivery.status == "sending":
        raise Conflict(f"Delivery '{delivery_id}' is being sent")
    if delivery.is_test:
        raise Conflict(f"Delivery '{delivery_id}' was a test: test the endpoint again")
    if delivery.endpoint_id is not None:
        _check_takes(session.get(Endpoint, delivery.endpoint_id, populate_existing=True))
    receivers.forgive(session, tenant_id, delivery.receiver)
    session.execute(update(Delivery).where(Delivery.id == delivery_id).values(_anew()))
    return find(session, tenant_id, delivery_id)


def redeliver_range(session: Session, tenant_id: str, endpoint_id: str, body: Mapping[str, object]) -> int:
    """The same for an endpoint's deliveries of a time that have ended, oldest first; how many there are.

    Raises InvalidRequest, NotFound, and Conflict where the endpoint is disabled.
    """
    asked = submissions.validated(Range, body)
    endpoint = endpoints.find(session, tenant_id, endpoint_id)
    _check_takes(endpoint)
    wanted = (
        select(Delivery.id)
        .where(
            Delivery.endpoint_id == endpoint.id,
            Delivery.is_test.is_(False),
            Delivery.created_at >= asked.since,
            Delivery.status == asked.status if asked.status else Delivery.status.in_(("delivered", "dead")),
        )
        .order_by(Delivery.id)
        .limit(MAX_REDELIVERIES)
        .with_for_update(skip_locked=True)
    )
    if asked.until is not None:
        wanted = wanted.where(Delivery.created_at < asked.until)
    due = session.execute(update(Delivery).where(Delivery.id.in_(wanted.scalar_subquery())).values(_anew()))
    receivers.forgive(session, tenant_id, endpoint.id)
    return int(due.rowcount)  # type: ignore[attr-defined]


def _check_takes(endpoint: Endpoint | None) -> None:
    if endpoint is None or not endpoint.enabled:
        raise Conflict("The endpoint is disabled: enable it first" if endpoint else "The endpoint was deleted")


def _anew() -> dict[str, Any]:
    """The columns of a delivery whose attempts begin again."""
    return {
        "status": "pending",
        "next_at": tables.NOW,
        "last_attempt": Delivery.attempts + MAX_ATTEMPTS,
        "give_up_at": tables.NOW + timedelta(seconds=GIVE_UP_S),
        "error": None,
        "response_status": None,
        "delivered_at": None,
    }


def add_test(
    session: Session, tenant_id: str, endpoint_id: str, body: Mapping[str, object], *, patience_s: float
) -> Delivery:
    """Write a delivery of a sample event to an endpoint, enabled or not: due at once, tried once, for so many seconds.

    Raises InvalidRequest and NotFound.
    """
    asked = submissions.validated(Trial, body)
    if asked.event_type not in EVENT_TYPES:
        raise InvalidRequest(f"event_type must be one of {', '.join(EVENT_TYPES)}", param="event_type")
    endpoint = endpoints.find(session, tenant_id, endpoint_id)
    receivers.forgive(session, tenant_id, endpoint.id)
    notice, moment = sample(asked.event_type), db.now(session)
    delivery = Letters(tenant_id, str(notice.data["id"]), moment).to_endpoint(notice, endpoint)
    delivery.is_test, delivery.last_attempt = True, 1
    delivery.next_at = moment - timedelta(seconds=GIVE_UP_S)  # before all that waits for the endpoint
    delivery.give_up_at = moment + timedelta(seconds=patience_s)
    session.add(delivery)
    session.flush()
    return delivery
