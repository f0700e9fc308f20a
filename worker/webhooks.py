"""Deliveries: who is due is announced to the io workers, who post them.

A message is only a hint that an attempt may start; the schedule lives in Postgres, never in the broker.
"""

from __future__ import annotations

import time

from app import deliveries
from app.broker import Broker, BrokerError
from app.db import Database
from app.deliveries import Outcome
from app.settings import Settings
from app.vault import Vault
from worker.posts import post

MAX_IN_FLIGHT = 24
"""Deliveries at the broker or being posted: half as many again as an io worker has threads, so that none waits long
behind receivers that hang."""
ROUND_S = 5.0
"""A round that finds ever more to send ends after so long, so that a stop is seen."""


def send_due(database: Database, broker: Broker) -> None:
    """One round: name deliveries that are due to the io workers, until no more may go. Raises BrokerError."""
    started = time.monotonic()
    while _send_some(database, broker) and time.monotonic() - started < ROUND_S:
        pass


def _send_some(database: Database, broker: Broker) -> bool:
    """Take what is due and may go now, and send its messages; whether there was any."""
    with database.autocommit() as session:
        taken = deliveries.due(session, MAX_IN_FLIGHT)
    for position, (delivery_id, attempt) in enumerate(taken):
        try:
            broker.send_delivery(delivery_id, attempt)
        except BrokerError:
            with database.transaction() as session:
                deliveries.give_back(session, taken[position:])
            raise
    return bool(taken)


def deliver(database: Database, vault: Vault, settings: Settings, delivery_id: str, attempt: int) -> Outcome | None:
    """Post one delivery, record the outcome and return it. None for a message that is late or doubled."""
    with database.transaction() as session:
        outgoing = deliveries.start(session, vault, delivery_id, attempt)
    if outgoing is None:
        return None
    outcome = post(outgoing, delivery_id, settings)  # no connection is held while a receiver takes its time
    with database.transaction() as session:
        deliveries.record(session, delivery_id, attempt, outcome)
    return outcome
