"""Receivers that fail: whoever does so several times in a row is left alone for a while, so that he slows nobody else.

    takes all ──failure──▶ failing ──the fifth in a row──▶ paused ──pause over──▶ tried by one delivery at a time
        ▲                     │                               ▲                            │
        └───── a success ─────┴───────────────────────────────┼──── a failure ─────────────┤
        └─────────────────────────────────────────────────────┼──── a success ─────────────┘

A receiver is an endpoint, or the URLs of one origin that a tenant's jobs and batches name. What is known of it stands
in Postgres: it outlives processes, and all senders see the same.
"""

from __future__ import annotations

import random

from sqlalchemy import delete, text
from sqlalchemy.orm import Session

from app.tables import Receiver

TOLERATED_FAILURES = 5
"""So many failed attempts in a row pause a receiver."""
FIRST_PAUSE_S = 30.0
LONGEST_PAUSE_S = 600.0
"""A pause doubles with each failure that follows one: 30 s, 1 min, 2 min, 4 min, 8 min, 10 min, 10 min …"""
JITTER = 0.2
"""Each pause is stretched by up to this share."""

_FAIL = text(
    """
    insert into receivers as known (tenant_id, name, failures, paused_until, failed_at)
    values (
        :tenant_id, :name, 1, clock_timestamp() + make_interval(secs => nullif(cast(:asked_s as float8), 0)),
        clock_timestamp()
    )
    on conflict (tenant_id, name) do update set
        failed_at = excluded.failed_at,
        failures = case when known.paused_until > excluded.failed_at then known.failures else known.failures + 1 end,
        paused_until = greatest(
            known.paused_until,
            excluded.paused_until,
            case
                when known.paused_until > excluded.failed_at or known.failures + 1 < :tolerated then null
                else excluded.failed_at + make_interval(
                    secs => :stretch
                        * least(:longest_s, :first_s * power(2, least(20, known.failures + 1 - :tolerated)))
                )
            end
        )
    """
)
"""An attempt that was under way when the pause began does not lengthen it."""


def fail(session: Session, tenant_id: str, name: str, *, asked_s: float = 0.0) -> None:
    """Note that an attempt failed; asked_s is the pause that the receiver itself asked for, in seconds."""
    session.execute(
        _FAIL,
        {
            "tenant_id": tenant_id,
            "name": name,
            "asked_s": asked_s,
            "tolerated": TOLERATED_FAILURES,
            "first_s": FIRST_PAUSE_S,
            "longest_s": LONGEST_PAUSE_S,
            "stretch": 1 + JITTER * random.random(),
        },
    )


def forgive(session: Session, tenant_id: str, name: str) -> None:
    """Forget its failures: it took a delivery, or its tenant asks for another try."""
    session.execute(
        delete(Receiver)
        .where(Receiver.tenant_id == tenant_id, Receiver.name == name)
        .execution_options(synchronize_session=False)
    )
