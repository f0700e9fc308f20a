"""Deliveries: when each is posted, and when it is tried again.

    pending ──due()──▶ sending ──record()──▶ delivered | dead
       ▲                 │  ▲
       └──── retry ──────┘  └── due() again once the lease ran out: the message or the sender was lost

An attempt is numbered by start(): of several messages that name the same attempt, one starts it. So a delivery is
posted at least once, and a lost message costs no attempt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, case, select, text, update
from sqlalchemy.orm import Session

from app import receivers, tables
from app.tables import Delivery, DeliveryAttempt, Endpoint, Tenant
from app.vault import Vault

RETRY_DELAYS_S = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Seconds after the first, second, … failed attempt: 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h."""
MAX_ATTEMPTS = len(RETRY_DELAYS_S) + 1
JITTER = 0.2
"""Each delay is stretched by up to this share, so that retries of one outage do not come back as one crowd."""
MAX_RETRY_AFTER_S = 86_400
"""A receiver's Retry-After counts up to so many seconds."""

GIVE_UP_S = 345_600
"""A delivery is given up after four days, longer than its attempts take, for one to a paused receiver makes none."""

QUEUE_LEASE_S = 30
"""A delivery whose message was not taken up for so long is due again."""
SEND_LEASE_S = 60
"""A sender that reports nothing for so long is dead; longer than any attempt may take."""
MAX_IN_FLIGHT_PER_TENANT = 8
MAX_IN_FLIGHT_PER_RECEIVER = 4
"""So that a tenant's hanging receiver leaves senders to his others, and he to the other tenants. One whose last attempt
failed gets one delivery at a time."""
MAX_IN_FLIGHT_TO_FAILING = 8
"""To receivers whose last attempt failed, of all tenants together: the other senders are for those that answer."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An attempt that has started: what is to be posted, and where."""

    url: str
    body: str
    secrets: tuple[str, ...]
    """Each signs it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended."""

    status: int | None = None
    """The receiver's HTTP status; None when there was no answer."""
    error: str | None = None
    """Why there was no answer."""
    retry_after_s: float | None = None
    """What the receiver asked for."""

    @property
    def is_delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def is_gone(self) -> bool:
        """The receiver wants no more of it."""
        return self.status == 410

    @property
    def asked_s(self) -> float:
        """The pause that counts of what the receiver asked for: of one that has too much to do, up to a day."""
        return min(self.retry_after_s or 0.0, MAX_RETRY_AFTER_S) if self.status in (429, 502, 503, 504) else 0.0


def retry_delay_s(failed: int, jitter: float) -> float | None:
    """Seconds to wait after so many attempts failed; None when it was the last.

    jitter  from 0 to 1: 0 gives the plain series, 1 the most stretched one.
    """
    if failed >= MAX_ATTEMPTS:
        return None
    return RETRY_DELAYS_S[failed - 1] * (1 + JITTER * jitter)


_GIVE_UP_LATE = text(
    """
    update deliveries set
        status = 'dead',
        error = case
            when status = 'sending' then 'the sender was lost in the last attempt'
            else coalesce(error, 'the receiver was paused for too long')
        end
    where id in (
        select id from deliveries
        where (status = 'sending' and next_at <= statement_timestamp() and attempts >= last_attempt)
        or (status = 'pending' and give_up_at <= statement_timestamp())
        limit 1000
        for update skip locked
    )
    """
)
_TAKE_DUE = text(
    """
    with recursive receiver_names as (
        (
            select tenant_id, receiver from deliveries where status in ('pending', 'sending')
            order by tenant_id, receiver limit 1
        )
        union all
        select following.* from receiver_names cross join lateral (
            select tenant_id, receiver from deliveries
            where status in ('pending', 'sending')
            and (tenant_id, receiver) > (receiver_names.tenant_id, receiver_names.receiver)
            order by tenant_id, receiver limit 1
        ) as following
    ), in_flight as (
        select deliveries.tenant_id, receiver, count(*) as number, bool_or(receivers.name is not null) as is_failing
        from deliveries left join receivers on (receivers.tenant_id, name) = (deliveries.tenant_id, receiver)
        where status = 'sending' and next_at > statement_timestamp()
        group by 1, 2
    ), open as (
        select receiver_names.tenant_id, receiver, receivers.name is not null as is_failing,
            coalesce(in_flight.number, 0) as busy,
            case when receivers.name is null then :per_receiver else 1 end as most
        from receiver_names left join in_flight using (tenant_id, receiver)
            left join receivers on (receivers.tenant_id, name) = (receiver_names.tenant_id, receiver)
        where receivers.paused_until is null or receivers.paused_until <= statement_timestamp()
    ), waiting as (
        select open.tenant_id, open.is_failing, ready.id, ready.next_at,
            busy + row_number() over (partition by tenant_id, receiver order by ready.next_at, ready.id) as place
        from open cross join lateral (
            select id, next_at from deliveries
            where tenant_id = open.tenant_id and receiver = open.receiver and status in ('pending', 'sending')
            and next_at <= statement_timestamp() and attempts < last_attempt
            order by next_at, id
            limit greatest(most - busy, 0)
        ) as ready
    ), ranked as (
        select id, place, next_at, is_failing,
            row_number() over (partition by tenant_id order by place, next_at, id)
                + coalesce((select sum(number) from in_flight where tenant_id = waiting.tenant_id), 0) as of_tenant,
            row_number() over (partition by is_failing order by place, next_at, id)
                + coalesce((select sum(number) from in_flight where is_failing), 0) as of_failing
        from waiting
    ), chosen as (
        select id from ranked
        where of_tenant <= :per_tenant and (not is_failing or of_failing <= :to_failing)
        order by place, next_at, id
        limit greatest(:limit - (select coalesce(sum(number), 0) from in_flight), 0)
    )
    update deliveries set status = 'sending', next_at = clock_timestamp() + make_interval(secs => :lease_s)
    where id in (
        select id from deliveries
        where id in (select id from chosen) and status in ('pending', 'sending') and next_at <= statement_timestamp()
        order by id for update skip locked
    )
    returning id, attempts
    """
)
"""receiver_names steps from one receiver to the next in the index, so that a long backlog costs a look. Everybody's
first delivery goes before anybody's second. The innermost conditions are repeated so that they hold of the locked row,
not only of the snapshot."""


def due(session: Session, limit: int) -> Sequence[tuple[str, int]]:
    """Take deliveries that are due, oldest first of each receiver: (id, number of the attempt to start).

    At most limit are in flight at once, those of earlier rounds included, and so many of a tenant and to a receiver as
    the constants above say; to one that is paused none. What is late for good, or whose last attempt was started and
    never reported, is dead.
    """
    session.execute(_GIVE_UP_LATE)
    rows = session.execute(
        _TAKE_DUE,
        {
            "limit": limit,
            "per_tenant": MAX_IN_FLIGHT_PER_TENANT,
            "per_receiver": MAX_IN_FLIGHT_PER_RECEIVER,
            "to_failing": MAX_IN_FLIGHT_TO_FAILING,
            "lease_s": QUEUE_LEASE_S,
        },
    )
    return [(row.id, row.attempts + 1) for row in rows]


def give_back(session: Session, deliveries: Sequence[tuple[str, int]]) -> None:
    """Make taken deliveries due again at once: their messages could not be sent."""
    for delivery_id, attempt in deliveries:
        session.execute(
            update(Delivery)
            .where(Delivery.id == delivery_id, Delivery.status == "sending", Delivery.attempts == attempt - 1)
            .values(status="pending", next_at=tables.NOW)
            .execution_options(synchronize_session=False)
        )


def start(session: Session, vault: Vault, delivery_id: str, attempt: int) -> Outgoing | None:
    """Start an attempt that a message named, and hold it for SEND_LEASE_S.

    None when the message is late or doubled, or the endpoint is no longer there: then the delivery is dead.
    """
    started = session.execute(
        update(Delivery)
        .where(Delivery.id == delivery_id, Delivery.status == "sending", Delivery.attempts == attempt - 1)
        .values(attempts=attempt, next_at=_after(SEND_LEASE_S))
        .returning(Delivery.url, Delivery.body, Delivery.tenant_id, Delivery.endpoint_id, Delivery.is_test)
        .execution_options(synchronize_session=False)
    ).first()
    if started is None:
        return None
    url, secrets = started.url, _SECRETS_OF_TENANT.where(Tenant.id == started.tenant_id)
    if started.endpoint_id is not None:
        endpoint = session.get(Endpoint, started.endpoint_id, populate_existing=True)
        if endpoint is None or not (endpoint.enabled or started.is_test):
            _end_without_attempt(session, delivery_id, attempt, GONE if endpoint is None else DISABLED)
            return None
        url, secrets = endpoint.url, _SECRETS_OF_ENDPOINT.where(Endpoint.id == endpoint.id)
        session.execute(update(Delivery).where(Delivery.id == delivery_id).values(url=url))
    session.add(DeliveryAttempt(delivery_id=delivery_id, number=attempt))
    session.flush()
    encrypted = session.execute(secrets).one()
    in_force = tuple(vault.decrypt(secret) for secret in encrypted if secret is not None)
    return Outgoing(url=url, body=started.body, secrets=in_force)


_SECRETS_OF_TENANT = select(
    Tenant.webhook_secret, case((Tenant.old_webhook_secret_until > tables.NOW, Tenant.old_webhook_secret))
)
_SECRETS_OF_ENDPOINT = select(Endpoint.secret, case((Endpoint.old_secret_until > tables.NOW, Endpoint.old_secret)))
GONE = "the endpoint was deleted"
DISABLED = "the endpoint is disabled"


def _end_without_attempt(session: Session, delivery_id: str, attempt: int, why: str) -> None:
    ended = {"status": "dead", "attempts": attempt - 1, "error": why}
    session.execute(update(Delivery).where(Delivery.id == delivery_id).values(ended))


def record(session: Session, delivery_id: str, attempt: int, outcome: Outcome) -> None:
    """Keep how an attempt ended. Of the delivery without effect once a later attempt has started, or it has ended.

    An endpoint that is gone is disabled.
    """
    session.execute(
        update(DeliveryAttempt)
        .where(DeliveryAttempt.delivery_id == delivery_id, DeliveryAttempt.number == attempt)
        .values(ended_at=tables.NOW, response_status=outcome.status, error=outcome.error)
        .execution_options(synchronize_session=False)
    )
    delivery = session.scalar(
        select(Delivery)
        .where(Delivery.id == delivery_id, Delivery.status == "sending", Delivery.attempts == attempt)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    if delivery is None:
        return
    session.execute(
        update(Delivery)
        .where(Delivery.id == delivery_id)
        .values(response_status=outcome.status, **_consequence(delivery, outcome))
        .execution_options(synchronize_session=False)
    )
    if outcome.is_delivered:
        receivers.forgive(session, delivery.tenant_id, delivery.receiver)
    elif outcome.is_gone:
        _disable(session, delivery)
    elif not delivery.is_test:
        receivers.fail(session, delivery.tenant_id, delivery.receiver, asked_s=outcome.asked_s)


def _consequence(delivery: Delivery, outcome: Outcome) -> dict[str, Any]:
    """The columns that an outcome changes."""
    if outcome.is_delivered:
        return {"status": "delivered", "delivered_at": tables.NOW, "error": None}
    error = outcome.error or f"the receiver answered {outcome.status}"
    delay_s = retry_delay_s(MAX_ATTEMPTS - (delivery.last_attempt - delivery.attempts), random.random())
    if delay_s is None or outcome.is_gone:
        return {"status": "dead", "error": error}
    return {"status": "pending", "next_at": _after(max(delay_s, outcome.asked_s)), "error": error}


def _disable(session: Session, delivery: Delivery) -> None:
    """The receiver wants no more: disable the endpoint, if it is one."""
    if delivery.endpoint_id is None:
        return
    gone = {"enabled": False, "disabled_reason": "the receiver answered 410: gone", "updated_at": tables.NOW}
    session.execute(update(Endpoint).where(Endpoint.id == delivery.endpoint_id, Endpoint.enabled).values(gone))
    give_up(session, delivery.endpoint_id, DISABLED)


def give_up(session: Session, endpoint_id: str, why: str) -> None:
    """End all deliveries of an endpoint that wait."""
    session.execute(
        update(Delivery)
        .where(Delivery.endpoint_id == endpoint_id, Delivery.status == "pending", Delivery.is_test.is_(False))
        .values(status="dead", error=why)
        .execution_options(synchronize_session=False)
    )


def _after(seconds: float) -> ColumnElement[datetime]:
    return tables.NOW + timedelta(seconds=seconds)
