"""When webhooks are posted, and when they are tried again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app import db, deliveries, receivers, redeliveries, tables, tenants
from app.db import Database
from app.deliveries import Outcome
from app.errors import SetupError
from app.ids import new_id
from app.settings import Settings
from app.tables import Delivery, Receiver
from app.tiers import Plan
from app.vault import Vault


def test_delays_follow_the_series_and_end() -> None:
    plain = [deliveries.retry_delay_s(attempt, 0.0) for attempt in range(1, deliveries.MAX_ATTEMPTS + 1)]
    minute, hour = 60, 3_600
    series = [5, 5 * minute, 30 * minute, 2 * hour, 5 * hour, 10 * hour, 14 * hour, 20 * hour, 24 * hour]
    assert plain == [*series, None]
    assert deliveries.retry_delay_s(1, 1.0) == 5 * (1 + deliveries.JITTER)


FAILED = Outcome(status=500)
ORIGIN = "https://example.com:443"


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
                receiver=ORIGIN,
                event_type="job.succeeded",
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
        """Let its time, or its lease, have come, and a pause of its receiver be over."""
        with self.database.transaction() as session:
            session.execute(update(Delivery).where(Delivery.id == delivery_id).values(next_at=tables.NOW))
            session.execute(update(Receiver).where(Receiver.paused_until > tables.NOW).values(paused_until=tables.NOW))

    def row(self, delivery_id: str) -> Delivery:
        with self.database.transaction() as session:
            return session.scalars(select(Delivery).where(Delivery.id == delivery_id)).one()

    def pause_s(self, name: str = ORIGIN) -> float | None:
        """How long the receiver is still paused."""
        with self.database.transaction() as session:
            receiver = session.get(Receiver, (self.tenant_id, name))
            if receiver is None or receiver.paused_until is None:
                return None
            return (receiver.paused_until - db.now(session)).total_seconds()

    def new_tenant(self) -> str:
        with self.database.transaction() as session:
            return tenants.provision(session, self.vault, name=new_id("name"), plan=Plan.PAID).tenant_id

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
    assert (outgoing.url, outgoing.body, outgoing.secrets) == ("https://example.com/", "{}", (desk.secret,))
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
    for number in range(20):
        desk.add(receiver=f"https://{number}.example:443")
    assert len(desk.take(limit=5)) == 5
    assert len(desk.take(limit=5)) == 0
    assert len(desk.take(limit=100)) == deliveries.MAX_IN_FLIGHT_PER_TENANT - 5
    assert desk.take(limit=100) == {}


def test_no_receiver_takes_all_that_its_tenant_may_have(desk: Desk) -> None:
    for _ in range(20):
        desk.add(receiver="https://busy.example:443")
    late = desk.add(receiver="https://calm.example:443")
    taken = desk.take()
    assert len(taken) == deliveries.MAX_IN_FLIGHT_PER_RECEIVER + 1
    assert late in taken
    assert desk.take() == {}


def test_each_receiver_gets_its_first_before_anyone_its_second(desk: Desk) -> None:
    for name in ("a", "b", "c"):
        for _ in range(4):
            desk.add(receiver=f"https://{name}.example:443")
    assert sorted(desk.row(delivery_id).receiver for delivery_id in desk.take(limit=3)) == [
        "https://a.example:443",
        "https://b.example:443",
        "https://c.example:443",
    ]


# ---- receivers that fail


def fail(desk: Desk, times: int, outcome: Outcome = FAILED) -> str:
    """One delivery, tried so often without success."""
    delivery_id = desk.add()
    for _ in range(times):
        desk.attempt(delivery_id, outcome)
    return delivery_id


def test_a_receiver_that_failed_gets_one_delivery_at_a_time_until_it_takes_one(desk: Desk) -> None:
    first = fail(desk, 1)
    for _ in range(8):
        desk.add()
    taken = desk.take()
    assert len(taken) == 1
    ((second, number),) = taken.items()
    desk.start(second, number)
    desk.record(second, number, Outcome(status=200))
    assert len(desk.take()) == deliveries.MAX_IN_FLIGHT_PER_RECEIVER
    assert desk.row(first).status == "pending"


def test_a_receiver_that_fails_in_a_row_is_paused_longer_each_time(desk: Desk) -> None:
    fail(desk, receivers.TOLERATED_FAILURES - 1)
    assert desk.pause_s() is None
    for expected_s in (30, 60, 120, 240, 480, 600, 600):
        desk.attempt(desk.add(last_attempt=1), FAILED)
        paused_s = desk.pause_s()
        assert paused_s is not None
        assert expected_s - 1 < paused_s <= expected_s * (1 + receivers.JITTER)
    desk.add()
    assert desk.take() == {}


def test_attempts_that_end_in_a_pause_do_not_lengthen_it(desk: Desk) -> None:
    under_way = [desk.add() for _ in range(deliveries.MAX_IN_FLIGHT_PER_RECEIVER)]
    for delivery_id, number in desk.take().items():
        desk.start(delivery_id, number)
    with desk.database.transaction() as session:
        for _ in range(receivers.TOLERATED_FAILURES):
            receivers.fail(session, desk.tenant_id, ORIGIN)
    before = desk.pause_s()
    for delivery_id in under_way:
        desk.record(delivery_id, 1, FAILED)
    after = desk.pause_s()
    assert before is not None and after is not None
    assert after <= before


def test_a_receivers_own_retry_after_pauses_it(desk: Desk) -> None:
    fail(desk, 1, Outcome(status=503, retry_after_s=600.0))
    paused_s = desk.pause_s()
    assert paused_s is not None
    assert 595 < paused_s <= 600
    desk.add()
    assert desk.take() == {}


def test_a_success_ends_what_was_known(desk: Desk) -> None:
    delivery_id = fail(desk, receivers.TOLERATED_FAILURES + 2)
    desk.attempt(delivery_id, Outcome(status=200))
    assert desk.pause_s() is None
    with desk.database.transaction() as session:
        assert session.scalars(select(Receiver).where(Receiver.tenant_id == desk.tenant_id)).all() == []


def test_receivers_that_fail_leave_senders_to_the_others(desk: Desk) -> None:
    others = [desk.new_tenant() for _ in range(3)]
    for tenant_id in others:
        for number in range(8):
            name = f"https://{number}.broken.example:443"
            desk.add(tenant_id=tenant_id, receiver=name)
            with desk.database.transaction() as session:
                receivers.fail(session, tenant_id, name)
    well = {desk.add(receiver=f"https://{number}.example:443") for number in range(4)}
    taken = desk.take(limit=24)
    assert well <= set(taken)
    assert len(taken) == len(well) + deliveries.MAX_IN_FLIGHT_TO_FAILING


def test_what_waits_too_long_for_a_paused_receiver_is_given_up(desk: Desk) -> None:
    delivery_id = desk.add()
    with desk.database.transaction() as session:
        receivers.fail(session, desk.tenant_id, ORIGIN, asked_s=86_400)
        session.execute(update(Delivery).where(Delivery.id == delivery_id).values(give_up_at=tables.NOW))
    assert desk.take() == {}
    row = desk.row(delivery_id)
    assert (row.status, row.error, row.attempts) == ("dead", "the receiver was paused for too long", 0)


def test_all_attempts_fit_into_the_time_until_a_delivery_is_given_up() -> None:
    assert sum(deliveries.RETRY_DELAYS_S) * (1 + deliveries.JITTER) < deliveries.GIVE_UP_S


def test_each_attempt_is_kept(desk: Desk) -> None:
    delivery_id = desk.add()
    for outcome in (Outcome(status=500), Outcome(error="no answer"), Outcome(status=204)):
        desk.attempt(delivery_id, outcome)
    with desk.database.transaction() as session:
        attempts = redeliveries.attempts_of(session, [delivery_id])[delivery_id]
    assert [(each.number, each.response_status, each.error) for each in attempts] == [
        (1, 500, None),
        (2, None, "no answer"),
        (3, 204, None),
    ]
    assert all(each.ended_at is not None and each.started_at <= each.ended_at for each in attempts)


def test_concurrent_rounds_take_each_delivery_once(desk: Desk) -> None:
    ids = {desk.add() for _ in range(4)}
    with desk.database.transaction() as first, desk.database.transaction() as second:
        taken = [delivery_id for session in (first, second) for delivery_id, _ in deliveries.due(session, 100)]
    assert sorted(taken) == sorted(ids)


def test_what_was_rolled_back_is_never_sent(desk: Desk) -> None:
    def add_and_fail(session: Session) -> None:
        session.add(
            Delivery(
                id="evt_x",
                tenant_id=desk.tenant_id,
                job_id="job_1",
                receiver="https://a.b:443",
                event_type="job.succeeded",
                url="https://a.b/",
                body="{}",
            )
        )
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
