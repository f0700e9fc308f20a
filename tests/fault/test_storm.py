"""A minute of random faults, and that the checker of promises would find any damage that they did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.fault import promises
from tests.fault.storm import Storm

DAMAGES = {
    "a lost job": ("delete from jobs where id = (select min(id) from jobs)", "is lost"),
    "an invented job": (
        'insert into jobs select (jsonb_populate_record(jobs, \'{"id": "job_x"}\')).* from jobs limit 1',
        "no client was told",
    ),
    "an innocent that failed": (
        "update jobs set status = 'failed' where id = (select min(id) from jobs where status = 'succeeded')",
        "is failed",
    ),
    "a gap in the events": (
        "delete from events where (job_id, number) ="
        " (select job_id, number from events where kind = 'running' limit 1)",
        "has events",
    ),
    "a second end": (
        "insert into events (job_id, number, kind) select job_id, max(number) + 1, 'succeeded' from events"
        " group by job_id order by job_id limit 1",
        "its events are",
    ),
    "a text that was shown twice": (
        "update events set text = text || text where (job_id, number) ="
        " (select job_id, number from events where kind = 'tokens' and text > '' limit 1)",
        "joined are not its result",
    ),
    "a token that was computed twice": (
        "update events set token_ids = token_ids || token_ids where (job_id, number) ="
        " (select job_id, number from events where kind = 'tokens' and cardinality(token_ids) > 0 limit 1)",
        "tokens and says",
    ),
    "another random stream": (
        "update jobs set sampling = sampling || '{\"seed\": 1}' where id ="
        " (select min(id) from jobs where completion_tokens > 20)",
        "no undisturbed run",
    ),
    "a token charged twice": (
        "update usage_days set prompt_tokens = prompt_tokens + 1 where tenant_id = (select min(id) from tenants)",
        "is charged",
    ),
    "a lost delivery": ("delete from deliveries where id = (select min(id) from deliveries)", "has 0 deliveries"),
    "a webhook that never came": (
        'insert into deliveries select (jsonb_populate_record(deliveries, \'{"id": "evt_x"}\')).* from deliveries'
        " limit 1",
        "never came",
    ),
}


@pytest.mark.timeout(400)
def test_a_minute_of_storm_breaks_no_promise(make_home: Callable[[], Path], subtests: pytest.Subtests) -> None:
    storm = Storm(seed=1, minutes=1.0)
    with storm.blow(make_home()) as (session, load):
        told = storm.summary(load)
        assert told["broken"] == [], told
        assert sum(told["faults"].values()) >= 5 and told["jobs"] > 50 and told["webhooks"] > 5, told
        for name, (damage, complaint) in DAMAGES.items():
            with subtests.test(name), session.begin_nested() as savepoint:
                session.execute(text(damage))
                session.expire_all()
                found = promises.broken(session, load)
                assert any(complaint in line for line in found), found
                savepoint.rollback()
        session.expire_all()
        (followed, *_) = [order for order in load.orders if order.events]
        last = followed.events.pop()  # type: ignore[union-attr]
        assert any("the follower of" in line for line in promises.broken(session, load))
        followed.events.append(last)  # type: ignore[union-attr]
        assert promises.broken(session, load) == []
