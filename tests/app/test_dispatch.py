"""What goes to the broker, in which order, and how much of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis as redis_client
from sqlalchemy import select, update

from app import claims, recovery
from app.broker import Broker, BrokerError, queue_name
from app.children import free_port, wait_until
from app.db import Database
from app.dispatch import Dispatcher, dispatch
from app.tables import Job
from app.tiers import POLICIES, Tier


@pytest.fixture
def broker(redis_url: str) -> Iterator[Broker]:
    broker = Broker(redis_url)
    yield broker
    broker.close()


@pytest.fixture
def name(redis: redis_client.Redis) -> Iterator[str]:
    """A model of the test's own, and so queues of its own."""
    name = f"model-{uuid4().hex}"
    yield name
    redis.delete(*[queue_name(name, tier) for tier in Tier])


def messages(redis: redis_client.Redis, model: str, tier: Tier) -> list[list[list[Any]]]:
    """The jobs of each message in the queue, first sent first."""
    bodies = [json.loads(raw)["body"] for raw in redis.lrange(queue_name(model, tier), 0, -1)][::-1]
    return [json.loads(base64.b64decode(body))[1]["jobs"] for body in bodies]


def sent(redis: redis_client.Redis, model: str, tier: Tier) -> list[str]:
    return [job_id for message in messages(redis, model, tier) for job_id, _ in message]


def test_a_message_holds_ids_and_dispatch_numbers_alone(
    db: Database, broker: Broker, redis: redis_client.Redis, name: str, submit: Any
) -> None:
    job_id = submit(model=name)
    assert dispatch(db, broker, name) == 1
    with db.transaction() as session:
        number = session.scalar(select(Job.dispatch_number).where(Job.id == job_id))
    assert messages(redis, name, Tier.PAID) == [[[job_id, number]]]
    assert broker.waiting(name, Tier.PAID) == 1
    assert dispatch(db, broker, name) == 0  # once


def test_a_job_takes_a_place_for_each_of_its_choices(
    db: Database, broker: Broker, name: str, submit: Any, new_worker: Any
) -> None:
    worker = new_worker(name)  # four slots
    worker.claim(submit(model=name, num_choices=3))
    waiting = [submit(model=name, num_choices=2) for _ in range(POLICIES[Tier.PAID].lookahead + 6)]
    room = 1 + POLICIES[Tier.PAID].lookahead
    assert dispatch(db, broker, name) == (room + 1) // 2 < len(waiting)
    assert dispatch(db, broker, name) == 0


@pytest.mark.parametrize("tier", Tier)
def test_a_tiers_window_is_the_free_slots_and_a_little_more(
    db: Database, broker: Broker, redis: redis_client.Redis, name: str, submit: Any, new_worker: Any, tier: Tier
) -> None:
    job_ids = [submit(model=name, tier=tier) for _ in range(POLICIES[tier].lookahead + 6)]
    assert dispatch(db, broker, name) == POLICIES[tier].lookahead  # no worker yet
    worker = new_worker(name)  # four slots
    new_worker(name).die()
    new_worker(name).stop_taking()
    assert dispatch(db, broker, name) == 4
    assert dispatch(db, broker, name) == 0
    worker.claim(job_ids[0])  # one leaves the broker, and one slot is taken: its place is not filled
    assert dispatch(db, broker, name) == 0
    assert sent(redis, name, tier) == job_ids[:-2]


def test_the_oldest_goes_first_and_what_was_handed_back_before_it(
    db: Database, broker: Broker, redis: redis_client.Redis, name: str, submit: Any, worker: Any
) -> None:
    job_ids = [submit(model=name) for _ in range(4)]
    worker.claim(job_ids[2])
    with db.transaction() as session:
        claims.hand_back(session, worker.id, [job_ids[2]])
    dispatch(db, broker, name)
    assert sent(redis, name, Tier.PAID) == [job_ids[2], job_ids[0], job_ids[1], job_ids[3]]


@pytest.mark.parametrize(
    ("slots", "tier", "sizes"),
    [
        (None, Tier.BULK, [1, 1, 1, 1, 1]),  # no worker yet: nobody knows how many one could take
        (12, Tier.BULK, [3, 2]),  # a quarter of the slots
        (400, Tier.BULK, [5]),
        (400, Tier.PAID, [1, 1, 1, 1, 1]),
    ],
)
def test_bulk_jobs_share_messages_that_a_worker_can_take(
    db: Database,
    broker: Broker,
    redis: redis_client.Redis,
    name: str,
    submit: Any,
    new_worker: Any,
    slots: int | None,
    tier: Tier,
    sizes: list[int],
) -> None:
    if slots is not None:
        new_worker(name, slots)
    job_ids = [submit(model=name, tier=tier) for _ in range(5)]
    dispatch(db, broker, name)
    assert [len(message) for message in messages(redis, name, tier)] == sizes
    assert sent(redis, name, tier) == job_ids


def test_of_jobs_under_which_workers_died_one_at_a_time_is_sent(
    db: Database, broker: Broker, redis: redis_client.Redis, name: str, submit: Any, new_worker: Any
) -> None:
    suspects = [submit(model=name), submit(model=name), submit(model=name, tier=Tier.BULK)]
    with db.transaction() as session:
        session.execute(update(Job).where(Job.id.in_(suspects)).values(deaths=2, handed_back=True))
    innocent = submit(model=name)
    worker = new_worker(model=name)

    dispatch(db, broker, name)
    assert sent(redis, name, Tier.PAID) == [suspects[0]], "a round for itself"
    dispatch(db, broker, name)
    assert sent(redis, name, Tier.PAID) == [suspects[0], innocent], "the line goes on beside it"
    (claim,) = worker.claim(suspects[0])
    dispatch(db, broker, name)
    assert len(sent(redis, name, Tier.PAID)) == 2, "it has shown nothing yet"
    worker.write(claim, "a", claim.last_event + 1)
    dispatch(db, broker, name)
    assert sent(redis, name, Tier.PAID)[2:] == [suspects[1]]
    with db.transaction() as session:
        session.execute(update(Job).where(Job.id == suspects[1]).values(status="cancelled"))
    dispatch(db, broker, name)
    assert sent(redis, name, Tier.BULK) == [suspects[2]]


def test_other_models_jobs_stay(db: Database, broker: Broker, name: str, submit: Any) -> None:
    submit(model=f"{name}-other")
    assert dispatch(db, broker, name) == 0


def test_a_job_that_ended_while_it_waited_is_not_sent(db: Database, broker: Broker, name: str, submit: Any) -> None:
    job_id = submit(model=name)
    with db.transaction() as session:
        session.execute(update(Job).where(Job.id == job_id).values(status="cancelled"))
    assert dispatch(db, broker, name) == 0


def test_a_message_that_could_not_be_sent_is_sent_after_it_was_given_up(
    db: Database, broker: Broker, name: str, submit: Any
) -> None:
    job_id = submit(model=name)
    nowhere = Broker(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(BrokerError):
        dispatch(db, nowhere, name)
    nowhere.close()
    assert dispatch(db, broker, name) == 0  # it counts as sent
    with db.transaction() as session:
        assert recovery.forget_lost_messages(session, name, Tier.PAID, queue_is_empty=True, grace_s=0) == 1
    assert dispatch(db, broker, name) == 1
    assert job_id


def test_a_nudge_dispatches(db: Database, broker: Broker, redis: redis_client.Redis, name: str, submit: Any) -> None:
    dispatcher = Dispatcher(db, broker, name)
    try:
        for count in (1, 2):
            submit(model=name)
            dispatcher.nudge()
            assert wait_until(lambda count=count: redis.llen(queue_name(name, Tier.PAID)) == count, 10)  # type: ignore[misc]
    finally:
        dispatcher.close()


def test_a_timer_dispatches_what_nobody_nudged(
    db: Database, broker: Broker, redis: redis_client.Redis, name: str, submit: Any
) -> None:
    submit(model=name)
    dispatcher = Dispatcher(db, broker, name, interval_s=0.02)
    try:
        assert wait_until(lambda: redis.llen(queue_name(name, Tier.PAID)) == 1, 10)
    finally:
        dispatcher.close()
