"""The event log: append under the fence, replay, follow, and the hub that spreads announcements."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client

from app import events, jobs
from app.children import free_port, wait_until
from app.db import Database
from app.embedded.valkey import Valkey
from app.events import BACKLOG, Delta, Event, Hub
from app.home import Home

PATIENCE: dict[str, float] = {"heartbeat_s": 30.0, "poll_s": 30.0}
"""So long that nothing in these tests comes by the clock."""


@pytest.fixture
def hub(redis: redis_client.Redis) -> Iterator[Hub]:
    hub = Hub(redis)
    yield hub
    hub.close()


def started(submit: Any, worker: Any) -> Any:
    """The claim of a new running job, whose next event is number 3."""
    return worker.take(submit())


# ---- append and replay


def test_only_rows_that_were_accepted_are_told(db: Database, submit: Any, worker: Any, owner: Any) -> None:
    kept, cancelled = started(submit, worker), started(submit, worker)
    with db.transaction() as session:
        jobs.cancel(session, owner.tenant_id, cancelled.job_id)
    deltas = [
        Delta(kept.job_id, 1, 3, "a", (1,)),
        Delta(cancelled.job_id, 1, 3, "x", (2,)),
        Delta(kept.job_id, 2, 5, "x", (3,)),  # an attempt that is not
        Delta("job_unknown", 1, 3, "x", (4,)),
        Delta(kept.job_id, 1, 4, "", (5, 6)),  # tokens that show nothing yet
    ]
    with db.transaction() as session:
        accepted = events.append_tokens(session, worker.id, deltas)
    assert [(event.job_id, event.number) for event in accepted] == [(kept.job_id, 3), (kept.job_id, 4)]
    with db.transaction() as session:
        assert events.replay(session, kept.job_id, 2) == accepted
        assert events.append_tokens(session, "another worker", [Delta(kept.job_id, 1, 5, "x", ())]) == []
        assert events.append_tokens(session, worker.id, []) == []


def test_a_number_is_given_once(db: Database, submit: Any, worker: Any) -> None:
    claim = started(submit, worker)
    assert worker.write(claim, "first", 3) != []
    assert worker.write(claim, "second", 3) == []
    with db.transaction() as session:
        assert [event.data.get("text") for event in events.replay(session, claim.job_id, 2)] == ["first"]


@pytest.mark.parametrize("text", ["", "\0", "\u2028", "a\nb", "\U0001f600", "\ufffe", "'; drop table events; --"])
def test_any_text_of_a_model_comes_back_as_it_was(db: Database, submit: Any, worker: Any, text: str) -> None:
    claim = started(submit, worker)
    (written,) = worker.write(claim, text, 3)
    with db.transaction() as session:
        assert events.replay(session, claim.job_id, 2) == [written]


def test_a_replay_goes_page_by_page(db: Database, submit: Any, worker: Any) -> None:
    claim = started(submit, worker)
    deltas = [Delta(claim.job_id, 1, number, str(number), ()) for number in range(3, 10)]
    with db.transaction() as session:
        events.append_tokens(session, worker.id, deltas)
        page = events.replay(session, claim.job_id, 4, limit=3)
    assert [event.number for event in page] == [5, 6, 7]


# ---- follow


def collect(db: Database, hub: Hub, job_id: str, after: int = 0, **times: float) -> list[Event | None]:
    return list(events.follow(db, hub, job_id, after, **{**PATIENCE, **times}))


def test_following_from_any_number_gives_the_rest(
    db: Database, hub: Hub, submit: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PAGE", 2)  # several pages, and an end at a page's edge
    job_id = submit()
    worker.run(job_id, "a", "b", "c")
    numbers = [event.number for event in collect(db, hub, job_id) if event]
    assert numbers == [1, 2, 3, 4, 5, 6]
    for after in range(1, 8):
        assert [event.number for event in collect(db, hub, job_id, after) if event] == numbers[after:]


def test_a_follower_that_came_early_sees_what_a_late_one_sees(db: Database, hub: Hub, submit: Any, worker: Any) -> None:
    job_id = submit()
    with ThreadPoolExecutor(4) as pool:
        early = [pool.submit(collect, db, hub, job_id) for _ in range(4)]
        assert wait_until(lambda: hub.followers == 4, 10)
        worker.run(job_id, *"abcdefgh")
        late = collect(db, hub, job_id)
        assert [follower.result(20) for follower in early] == [late] * 4
    assert hub.followers == 0


def test_an_announcement_that_was_lost_is_read_from_the_rows(db: Database, hub: Hub, submit: Any, worker: Any) -> None:
    claim = started(submit, worker)
    follower = events.follow(db, hub, claim.job_id, 2, **PATIENCE)
    worker.write(claim, "a", 3)
    assert take(follower).number == 3
    with db.transaction() as session:  # never announced
        events.append_tokens(session, worker.id, [Delta(claim.job_id, 1, 4, "b", ())])
    worker.write(claim, "c", 5)
    assert [take(follower).number, take(follower).number] == [4, 5]
    follower.close()  # type: ignore[attr-defined]


def test_without_any_announcement_the_rows_are_read_now_and_then(
    db: Database, hub: Hub, submit: Any, worker: Any
) -> None:
    claim = started(submit, worker)
    follower = events.follow(db, hub, claim.job_id, 2, heartbeat_s=0.05, poll_s=0.1)
    assert next(follower) is None
    with db.transaction() as session:
        events.append_tokens(session, worker.id, [Delta(claim.job_id, 1, 3, "a", ())])
    assert next(event for event in follower if event is not None).number == 3
    follower.close()  # type: ignore[attr-defined]


def test_a_reader_that_is_too_slow_loses_nothing(db: Database, hub: Hub, submit: Any, worker: Any) -> None:
    claim = started(submit, worker)
    follower = events.follow(db, hub, claim.job_id, 2, **PATIENCE)
    worker.write(claim, "a", 3)
    assert take(follower).number == 3
    last = 3 + BACKLOG + 50
    deltas = [Delta(claim.job_id, 1, number, "x", ()) for number in range(4, last + 1)]
    with db.transaction() as session:
        accepted = events.append_tokens(session, worker.id, deltas)
    events.announce(worker.redis, accepted)
    worker.finish(claim)
    assert [event.number for event in follower if event] == list(range(4, last + 2))


def test_announcements_that_come_twice_or_late_are_shown_once(db: Database, hub: Hub, submit: Any, worker: Any) -> None:
    claim = started(submit, worker)
    follower = events.follow(db, hub, claim.job_id, 0, **PATIENCE)
    assert take(follower).number == 1
    written = [worker.write(claim, "a", 3), worker.write(claim, "b", 4)]
    for again in written:
        events.announce(worker.redis, again)
    worker.finish(claim)
    assert [event.number for event in follower if event] == [2, 3, 4, 5]


def test_a_quiet_job_beats(db: Database, hub: Hub, submit: Any) -> None:
    follower = events.follow(db, hub, submit(), 1, heartbeat_s=0.05, poll_s=30)
    assert [next(follower) for _ in range(3)] == [None] * 3
    follower.close()  # type: ignore[attr-defined]


def test_a_follower_who_is_ahead_of_a_busy_job_hears_beats_too(
    db: Database, hub: Hub, submit: Any, worker: Any
) -> None:
    claim = started(submit, worker)
    follower = events.follow(db, hub, claim.job_id, 10**9, heartbeat_s=0.1, poll_s=30)
    stopped = threading.Event()

    def write() -> None:
        number = 3
        while not stopped.wait(0.01):
            worker.write(claim, "a", number)
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert [next(follower) for _ in range(2)] == [None] * 2
    finally:
        stopped.set()
        writer.join()
        follower.close()  # type: ignore[attr-defined]


def test_following_ends_with_the_job_that_was_deleted(db: Database, hub: Hub, submit: Any, owner: Any) -> None:
    job_id = submit()
    follower = events.follow(db, hub, job_id, 1, heartbeat_s=0.05, poll_s=0.05)
    next(follower)
    with db.transaction() as session:
        jobs.remove(session, owner.tenant_id, job_id)
    assert [event for event in follower if event is not None] == []


def test_a_released_hub_ends_what_follows_at_once(db: Database, hub: Hub, submit: Any) -> None:
    job_id = submit()
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(collect, db, hub, job_id)
        assert wait_until(lambda: hub.followers == 1, 10)
        hub.release()
        assert [event.number for event in following.result(10) if event] in ([], [1])
    assert collect(db, hub, job_id) == []


def test_no_connection_is_held_while_nothing_happens(db: Database, hub: Hub, submit: Any) -> None:
    follower = events.follow(db, hub, submit(), 0, **PATIENCE)
    next(follower)
    assert db.pool.pool.checkedout() == 0  # type: ignore[attr-defined]
    follower.close()  # type: ignore[attr-defined]


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A server that a test may stop."""
    home = Home(tmp_path / "home")
    home.create()
    valkey = Valkey(home, free_port())
    valkey.start()
    assert wait_until(valkey.answers, 20)
    yield valkey
    valkey.stop()


def test_a_follower_outlives_the_broker(
    db: Database, submit: Any, worker: Any, own_valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_client.Redis.from_url(own_valkey.url, socket_timeout=5) as client:
        hub, worker.redis = Hub(client), client
        claim = started(submit, worker)
        follower = events.follow(db, hub, claim.job_id, 2, heartbeat_s=30, poll_s=0.2)
        worker.write(claim, "a", 3)
        assert take(follower).number == 3
        own_valkey.stop()
        worker.write(claim, "b", 4)  # stored, not announced
        assert take(follower).number == 4
        own_valkey.start()
        assert wait_until(own_valkey.answers, 20)
        assert wait_until(lambda: client.pubsub_numsub(events.channel(claim.job_id))[0][1] == 1, 20)
        worker.write(claim, "c", 5)
        worker.finish(claim)
        assert [event.number for event in follower if event] == [5, 6]
        hub.close()
    assert "was not announced" in caplog.text or "were not announced" in caplog.text


def test_ten_followers_of_a_job_take_one_subscription(
    db: Database, hub: Hub, submit: Any, redis: redis_client.Redis
) -> None:
    job_id = submit()
    followers = [events.follow(db, hub, job_id, 0, **PATIENCE) for _ in range(10)]
    for follower in followers:
        next(follower)

    def subscriptions() -> int:
        return int(redis.pubsub_numsub(events.channel(job_id))[0][1])

    assert wait_until(lambda: subscriptions() == 1, 10)
    for follower in followers:
        follower.close()  # type: ignore[attr-defined]
    assert wait_until(lambda: subscriptions() == 0, 10)


def take(follower: Iterator[Event | None]) -> Event:
    event = next(follower)
    assert event is not None
    return event


def test_many_followers_of_many_jobs_see_every_event_in_order(
    db: Database, hub: Hub, submit: Any, new_worker: Any
) -> None:
    """Writers and followers all at once, the followers joining at any moment."""
    job_ids = [submit() for _ in range(6)]
    texts = [f"{n} " for n in range(20)]

    def write(job_id: str) -> None:
        new_worker().run(job_id, *texts)

    def follow(job_id: str, delay_s: float) -> list[Event | None]:
        time.sleep(delay_s)  # spreads the moments of joining over the writing
        return collect(db, hub, job_id, poll_s=2.0)

    with ThreadPoolExecutor(24) as pool:
        writing = [pool.submit(write, job_id) for job_id in job_ids]
        following = [pool.submit(follow, job_id, delay / 50) for delay in range(3) for job_id in job_ids]
        for done in writing:
            done.result()
        for seen in following:
            told = [event for event in seen.result() if event]
            assert [event.number for event in told] == list(range(1, 24))
            assert "".join(event.data["text"] for event in told if event.kind == "tokens") == "".join(texts)
    assert threading.active_count() < 30
