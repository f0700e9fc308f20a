"""When webhooks are posted, and when they are tried again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app import db, deliveries, tables, tenants
from app.db import Database
from app.deliveries import Outcome
from app.errors import SetupError
from app.ids import new_id
from app.settings import Settings
from app.tables import Delivery
from app.tiers import Plan
from app.vault import Vault


def test_delays_follow_the_series_and_end() -> None:
    plain = [deliveries.retry_delay_s(attempt, 0.0) for attempt in range(1, deliveries.MAX_ATTEMPTS + 1)]
    minute, hour = 60, 3_600
    series = [5, 5 * minute, 30 * minute, 2 * hour, 5 * hour, 10 * hour, 14 * hour, 20 * hour, 24 * hour]
    assert plain == [*series, None]
    assert deliveries.retry_delay_s(1, 1.0) == 5 * (1 + deliveries.JITTER)


@dataclass(frozen=True)
class Desk:
    """A database with one tenant, and short ways to look at its deliveries."""

    database: Database
    vault: Vault
    tenant_id: str
    secret: str

    def add(self, **columns: object) -> str:
        with self.database.transaction() as session:
            delivery = Delivery(
                id=new_id("evt"),
                tenant_id=self.tenant_id,
                job_id="job_1",
                url="https://example.com/",
                body="{}",
                status="pending",
                attempts=0,
                next_at=db.now(session),
            )
            for name, value in columns.items():
                setattr(delivery, name, value)
            session.add(delivery)
            return delivery.id

    def take(self, limit: int = 100) -> dict[str, int]:
        with self.database.transaction() as session:
            return dict(deliveries.due(session, limit))

    def start(self, delivery_id: str, attempt: int) -> deliveries.Outgoing | None:
        with self.database.transaction() as session:
            return deliveries.start(session, self.vault, delivery_id, attempt)

    def record(self, delivery_id: str, attempt: int, outcome: Outcome) -> Delivery:
        with self.database.transaction() as session:
            deliveries.record(session, delivery_id, attempt, outcome)
        return self.row(delivery_id)

    def attempt(self, delivery_id: str, outcome: Outcome) -> Delivery:
        """Take it, start it and end it."""
        self.make_due(delivery_id)
        number = self.take()[delivery_id]
        assert self.start(delivery_id, number) is not None
        return self.record(delivery_id, number, outcome)

    def make_due(self, delivery_id: str) -> None:
        """Let its time, or its lease, have come."""
        with self.database.transaction() as session:
            session.execute(update(Delivery).where(Delivery.id == delivery_id).values(next_at=tables.NOW))

    def row(self, delivery_id: str) -> Delivery:
        with self.database.transaction() as session:
            return session.scalars(select(Delivery).where(Delivery.id == delivery_id)).one()

    def wait_s(self, delivery_id: str) -> float:
        with self.database.transaction() as session:
            return (self.row(delivery_id).next_at - db.now(session)).total_seconds()


@pytest.fixture
def desk(database: str, tmp_path: Path) -> Iterator[Desk]:
    opened = Database(database)
    vault = Vault.open(Settings(home=tmp_path))
    with opened.transaction() as session:
        session.execute(update(Delivery).values(status="dead"))  # of the tests before
        made = tenants.provision(session, vault, name=new_id("name"), plan=Plan.PAID)
    yield Desk(opened, vault, made.tenant_id, made.webhook_secret)
    opened.close()


def test_a_delivery_is_taken_once_and_started_once(desk: Desk) -> None:
    delivery_id = desk.add()
    assert desk.take() == {delivery_id: 1}
    assert desk.take() == {}
    outgoing = desk.start(delivery_id, 1)
    assert outgoing is not None
    assert (outgoing.url, outgoing.body, outgoing.secret) == ("https://example.com/", "{}", desk.secret)
    assert desk.start(delivery_id, 1) is None


def test_a_2xx_delivers(desk: Desk) -> None:
    row = desk.attempt(desk.add(), Outcome(status=204))
    assert (row.status, row.attempts, row.response_status, row.error) == ("delivered", 1, 204, None)
    assert row.delivered_at is not None


@pytest.mark.parametrize("outcome", [Outcome(status=500), Outcome(status=302), Outcome(error="no answer")])
def test_anything_else_is_tried_again_after_five_seconds(desk: Desk, outcome: Outcome) -> None:
    delivery_id = desk.add()
    row = desk.attempt(delivery_id, outcome)
    assert (row.status, row.attempts, row.response_status) == ("pending", 1, outcome.status)
    assert row.error
    assert 0 < desk.wait_s(delivery_id) <= 6
    assert desk.take() == {}


def test_a_receiver_that_is_gone_ends_it(desk: Desk) -> None:
    assert desk.attempt(desk.add(), Outcome(status=410)).status == "dead"


def test_it_dies_after_the_last_attempt(desk: Desk) -> None:
    delivery_id = desk.add()
    states = [desk.attempt(delivery_id, Outcome(status=500)).status for _ in range(deliveries.MAX_ATTEMPTS)]
    assert states == ["pending"] * (deliveries.MAX_ATTEMPTS - 1) + ["dead"]
    desk.make_due(delivery_id)
    assert desk.take() == {}


@pytest.mark.parametrize(
    ("status", "asked_s", "waits_s"),
    [
        (429, 600.0, 600),
        (503, 600.0, 600),
        (429, 1.0, 5),  # never sooner than the schedule
        (503, 1e9, deliveries.MAX_RETRY_AFTER_S),
        (500, 600.0, 5),  # only these two may ask
    ],
)
def test_retry_after_is_honoured(desk: Desk, status: int, asked_s: float, waits_s: float) -> None:
    delivery_id = desk.add()
    desk.attempt(delivery_id, Outcome(status=status, retry_after_s=asked_s))
    assert waits_s - 1 < desk.wait_s(delivery_id) <= waits_s * (1 + deliveries.JITTER)


def test_a_lost_message_costs_no_attempt(desk: Desk) -> None:
    delivery_id = desk.add()
    for _ in range(20):
        assert desk.take() == {delivery_id: 1}
        desk.make_due(delivery_id)


def test_a_late_message_does_not_start_a_second_attempt(desk: Desk) -> None:
    delivery_id = desk.add()
    desk.take()
    desk.make_due(delivery_id)
    desk.take()  # the first message was late, so there are two
    assert desk.start(delivery_id, 1) is not None
    assert desk.start(delivery_id, 1) is None


def test_a_lost_sender_is_replaced_and_its_late_report_has_no_effect(desk: Desk) -> None:
    delivery_id = desk.add()
    desk.take()
    desk.start(delivery_id, 1)
    desk.make_due(delivery_id)
    assert desk.take() == {delivery_id: 2}
    desk.start(delivery_id, 2)
    assert desk.record(delivery_id, 1, Outcome(status=500)).status == "sending"
    assert desk.record(delivery_id, 2, Outcome(status=200)).status == "delivered"
    assert desk.record(delivery_id, 2, Outcome(status=500)).status == "delivered"


def test_a_sender_lost_in_the_last_attempt_ends_it(desk: Desk) -> None:
    delivery_id = desk.add(status="sending", attempts=deliveries.MAX_ATTEMPTS)
    assert desk.take() == {}
    assert desk.row(delivery_id).status == "dead"


def test_what_cannot_be_announced_is_due_again_at_once(desk: Desk) -> None:
    delivery_id = desk.add()
    taken = desk.take()
    with desk.database.transaction() as session:
        deliveries.give_back(session, list(taken.items()))
    assert desk.take() == {delivery_id: 1}


def test_only_so_many_are_in_flight_and_no_tenant_takes_all(desk: Desk) -> None:
    for _ in range(20):
        desk.add()
    assert len(desk.take(limit=5)) == 5
    assert len(desk.take(limit=5)) == 0
    assert len(desk.take(limit=100)) == deliveries.MAX_IN_FLIGHT_PER_TENANT - 5
    assert desk.take(limit=100) == {}


def test_concurrent_rounds_take_each_delivery_once(desk: Desk) -> None:
    ids = {desk.add() for _ in range(4)}
    with desk.database.transaction() as first, desk.database.transaction() as second:
        taken = [delivery_id for session in (first, second) for delivery_id, _ in deliveries.due(session, 100)]
    assert sorted(taken) == sorted(ids)


def test_what_was_rolled_back_is_never_sent(desk: Desk) -> None:
    def add_and_fail(session: Session) -> None:
        session.add(Delivery(id="evt_x", tenant_id=desk.tenant_id, job_id="job_1", url="https://a.b/", body="{}"))
        session.flush()
        raise RuntimeError

    with pytest.raises(RuntimeError), desk.database.transaction() as session:
        add_and_fail(session)
    assert "evt_x" not in desk.take()


def test_a_failed_secret_leaves_the_attempt_unstarted(desk: Desk, tmp_path: Path) -> None:
    delivery_id = desk.add()
    desk.take()
    other = Vault.open(Settings(home=tmp_path / "other"))
    with pytest.raises(SetupError), desk.database.transaction() as session:
        deliveries.start(session, other, delivery_id, 1)
    assert desk.row(delivery_id).attempts == 0
    assert desk.wait_s(delivery_id) > 0
