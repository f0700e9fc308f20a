"""A worker that was taken for dead and wakes up: nothing of its old attempts is seen, and it is of use again."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select

from app import events, tables
from app.cli.demo.receiver import receiver
from app.events import Event, Hub
from tests.site import Site

SHORT, LONG = 40, 200
"""Tokens of a job that ends before the zombie wakes, and of one that somebody else runs as it does."""
EACH = 16
"""Jobs of both kinds; together more than a worker can hold."""


class Listener:
    """Hears all events that are published from its making on."""

    END = "the end"

    def __init__(self, site: Site) -> None:
        self._site = site
        self._pubsub: Any = site.redis.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self._pubsub.psubscribe(events.channel("*"))
        self._pubsub.subscribe(self.END)
        site.wait_for(lambda: site.redis.pubsub_numsub(self.END)[0][1] == 1)

    def all(self) -> Counter[tuple[str, int, str, str]]:
        """What was published until now, and how often."""
        self._site.redis.publish(self.END, "")
        heard: Counter[tuple[str, int, str, str]] = Counter()
        for message in self._pubsub.listen():
            if message["channel"].decode() == self.END:
                break
            number, kind, data = json.loads(message["data"])
            job_id = message["channel"].decode().removeprefix(events.channel(""))
            heard[_key(Event(job_id, number, kind, data))] += 1
        self._pubsub.close()
        return heard


def _key(event: Event) -> tuple[str, int, str, str]:
    return event.job_id, event.number, event.kind, json.dumps(event.data, sort_keys=True)


@contextmanager
def followers(site: Site, job_ids: Sequence[str]) -> Iterator[dict[str, list[Event]]]:
    """One for each job. The block ends once all of them have seen their jobs end; then this is what they got."""
    hub = Hub(site.redis)
    got: dict[str, list[Event]] = {}

    def follow(job_id: str) -> None:
        got[job_id] = [event for event in events.follow(site.db, hub, job_id, 0, heartbeat_s=10) if event is not None]

    with ThreadPoolExecutor(len(job_ids)) as pool:
        following = [pool.submit(follow, job_id) for job_id in job_ids]
        try:
            yield got
            site.wait_for(lambda: all(each.done() for each in following))
        finally:
            hub.close()
    for each in following:
        each.result()


def owned_by(site: Site, worker: tables.Worker) -> set[str]:
    with site.db.transaction() as session:
        return set(session.scalars(select(tables.Job.id).where(tables.Job.owner == worker.id)))


def attempts_lost(worker: tables.Worker) -> float:
    """Attempts that the process dropped because their jobs were its no more, as its metrics tell."""
    assert worker.metrics_url is not None
    families = text_string_to_metric_families(httpx.get(worker.metrics_url, trust_env=False).text)
    samples = [sample for family in families for sample in family.samples]
    return sum(each.value for each in samples if each.labels.get("outcome") == "lost" and each.name.endswith("_total"))


def taken_from_the_dead(site: Site) -> set[str]:
    """Jobs that were put back in line because their worker was dead."""
    back = tables.Event.data["reason"].astext == "its worker was lost"
    with site.db.transaction() as session:
        return set(session.scalars(select(tables.Event.job_id).where(tables.Event.kind == "queued", back)))


@pytest.mark.timeout(110)
def test_a_zombie_leaves_no_trace_and_comes_back_as_somebody_else(site: Site) -> None:
    tenant = site.new_tenant("billed", tokens_per_day=1_000_000)
    io = site.start_io(webhook_allow_private=True)
    zombie, heir = (site.spawn_worker(number, echo_step_ms=10.0) for number in (1, 2))
    site.wait_for(lambda: site.worker_of(zombie) and site.worker_of(heir))
    old, other = site.worker_of(zombie), site.worker_of(heir)
    assert old is not None and other is not None
    lengths = [SHORT, LONG] * EACH
    random.Random(1).shuffle(lengths)
    listener = Listener(site)
    with receiver() as receiving:
        of_tenant = {"tenant_id": tenant.tenant_id, "webhook_url": receiving.url}
        job_ids = [job_id for length in lengths for job_id in site.submit(**of_tenant, max_tokens=length)]
        long = {job_id for job_id, length in zip(job_ids, lengths, strict=True) if length == LONG}
        with followers(site, job_ids) as got:
            site.dispatch()
            site.wait_for(lambda: sum(bool(site.log(job_id).text) for job_id in owned_by(site, old)) >= EACH // 2)
            zombie.send_signal(signal.SIGSTOP)
            victims = owned_by(site, old)
            assert len(victims & long) >= 3 and len(victims - long) >= 3
            site.wait_for(lambda: site.statuses(victims - long)["succeeded"] >= 3)
            site.wait_for(lambda: len(owned_by(site, other) & victims & long) >= 3)
            zombie.send_signal(signal.SIGCONT)
            site.wait_for(lambda: site.worker_of(zombie))
            assert owned_by(site, other) & victims, "it woke while somebody else ran what it had"
            site.wait_until(job_ids, "succeeded")
        assert victims <= taken_from_the_dead(site)
        victims = taken_from_the_dead(site)  # also what Postgres gave it after it was stopped: it had asked before
        new = site.worker_of(zombie)
        assert new is not None and new.id != old.id
        assert attempts_lost(new) == len(victims)
        assert site.stop(heir) == 0
        after = site.run(4, **of_tenant)
        site.wait_until(after, "succeeded")
        site.wait_until_settled()
        posts = [receiving.inbox.get() for _ in range(receiving.inbox.qsize())]

    for job_id in [*job_ids, *after]:
        site.check_succeeded(job_id)
    with site.db.transaction() as session:
        stored = {job_id: events.replay(session, job_id, 0) for job_id in [*job_ids, *after]}
    assert got == {job_id: stored[job_id] for job_id in job_ids}
    assert listener.all() == Counter(
        _key(event)
        for log in stored.values()
        for event in log
        if event.number > 1  # nobody can follow a job before it is written
    )
    for job_id, log in stored.items():
        attempts = [event.data["attempt"] for event in log if event.kind == "running"]
        assert attempts == list(range(1, 2 + (job_id in victims)))
    tokens = site.check_bill(tenant.tenant_id, [*job_ids, *after])
    with site.db.transaction() as session:
        quota = session.scalars(select(tables.QuotaDay).where(tables.QuotaDay.tenant_id == tenant.tenant_id)).one()
    assert (quota.reserved, quota.used) == (0, tokens)
    told = Counter(event["data"]["id"] for post in posts if (event := post.verified(tenant.webhook_secret)) is not None)
    assert told == Counter([*job_ids, *after]) and len(posts) == told.total()
    for process in (io, zombie):
        assert site.stop(process) == 0
