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

from sqlalchemy import ColumnElement, select, text, update
from sqlalchemy.orm import Session

from app import tables
from app.tables import Delivery, Tenant
from app.vault import Vault

RETRY_DELAYS_S = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Seconds after the first, second, … failed attempt: 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h."""
MAX_ATTEMPTS = len(RETRY_DELAYS_S) + 1
JITTER = 0.2
"""Each delay is stretched by up to this share, so that retries of one outage do not come back as one crowd."""
MAX_RETRY_AFTER_S = 86_400
"""A receiver's Retry-After counts up to so many seconds."""

QUEUE_LEASE_S = 30
"""A delivery whose message was not taken up for so long is due again."""
SEND_LEASE_S = 60
"""A sender that reports nothing for so long is dead; longer than any attempt may take."""
MAX_IN_FLIGHT_PER_TENANT = 8
"""So that one tenant's hanging receiver does not hold every sender."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An attempt that has started: what is to be posted, and where."""

    url: str
    body: str
    secret: str


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


def retry_delay_s(attempt: int, jitter: float) -> float | None:
    """Seconds to wait after that many attempts failed; None when it was the last.

    jitter  from 0 to 1: 0 gives the plain series, 1 the most stretched one.
    """
    if attempt >= MAX_ATTEMPTS:
        return None
    return RETRY_DELAYS_S[attempt - 1] * (1 + JITTER * jitter)


_TAKE_DUE = text(
    """
    with lost as (
        update deliveries set status = 'dead', error = 'the sender was lost in the last attempt'
        where status = 'sending' and next_at <= statement_timestamp() and attempts >= :max_attempts
    ), busy as (
        select tenant_id, count(*) as deliveries from deliveries
        where status = 'sending' and next_at > statement_timestamp() group by tenant_id
    ), waiting as (
        select id, tenant_id, next_at, row_number() over (partition by tenant_id order by next_at, id) as place
        from deliveries
        where status in ('pending', 'sending') and next_at <= statement_timestamp() and attempts < :max_attempts
    ), chosen as (
        select id from waiting left join busy using (tenant_id)
        where place + coalesce(busy.deliveries, 0) <= :per_tenant
        order by next_at, id
        limit greatest(:limit - (select coalesce(sum(deliveries), 0) from busy), 0)
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
"""The innermost conditions are repeated so that they hold of the locked row, not only of the snapshot."""


def due(session: Session, limit: int) -> Sequence[tuple[str, int]]:
    """Take deliveries that are due, oldest first: (id, number of the attempt to start).

    At most limit are in flight at once, those of earlier rounds included, and MAX_IN_FLIGHT_PER_TENANT of a tenant.
    One whose last attempt was started and never reported is dead.
    """
    rows = session.execute(
        _TAKE_DUE,
        {
            "limit": limit,
            "per_tenant": MAX_IN_FLIGHT_PER_TENANT,
            "lease_s": QUEUE_LEASE_S,
            "max_attempts": MAX_ATTEMPTS,
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
    """Start an attempt that a message named, and hold it for SEND_LEASE_S. None when the message is late or doubled."""
    started = session.execute(
        update(Delivery)
        .where(Delivery.id == delivery_id, Delivery.status == "sending", Delivery.attempts == attempt - 1)
        .values(attempts=attempt, next_at=_after(SEND_LEASE_S))
        .returning(Delivery.url, Delivery.body, Delivery.tenant_id)
        .execution_options(synchronize_session=False)
    ).first()
    if started is None:
        return None
    secret = session.scalars(select(Tenant.webhook_secret).where(Tenant.id == started.tenant_id)).one()
    return Outgoing(url=started.url, body=started.body, secret=vault.decrypt(secret))


def record(session: Session, delivery_id: str, attempt: int, outcome: Outcome) -> None:
    """Keep how an attempt ended. Without effect once a later attempt has started, or the delivery has ended."""
    session.execute(
        update(Delivery)
        .where(Delivery.id == delivery_id, Delivery.status == "sending", Delivery.attempts == attempt)
        .values(response_status=outcome.status, **_consequence(attempt, outcome))
        .execution_options(synchronize_session=False)
    )


def _consequence(attempt: int, outcome: Outcome) -> dict[str, Any]:
    """The columns that an outcome changes."""
    if outcome.is_delivered:
        return {"status": "delivered", "delivered_at": tables.NOW, "error": None}
    error = outcome.error or f"the receiver answered {outcome.status}"
    delay_s = retry_delay_s(attempt, random.random())
    if delay_s is None or outcome.is_gone:
        return {"status": "dead", "error": error}
    asked_s = min(outcome.retry_after_s or 0.0, MAX_RETRY_AFTER_S) if outcome.status in (429, 503) else 0.0
    return {"status": "pending", "next_at": _after(max(delay_s, asked_s)), "error": error}


def _after(seconds: float) -> ColumnElement[datetime]:
    return tables.NOW + timedelta(seconds=seconds)
