"""A worker that is asked to stop takes nothing more, lets what is nearly done end, and hands back the rest."""

from __future__ import annotations

import subprocess
from collections.abc import Collection

import pytest
from sqlalchemy import select

from app import tables
from app.tables import Event, Worker
from tests.site import Site

SLOTS = 16
SHORT, LONG = 150, 4000
"""Tokens of a job that ends while the worker drains, and of one that does not."""


@pytest.fixture
def worker(site: Site) -> subprocess.Popen[bytes]:
    """One that makes a token in 10 ms and drains for 3 s."""
    return site.start_worker(echo_step_ms=10.0, drain_s=3.0)


def events_behind(site: Site, job_id: str, number: int) -> list[Event]:
    with site.db.transaction() as session:
        query = select(Event).where(Event.job_id == job_id, Event.number > number).order_by(Event.number)
        return list(session.scalars(query))


def wait_until_shown(site: Site, job_ids: Collection[str]) -> None:
    site.wait_for(lambda: all(site.texts(job_ids).values()))


def test_short_jobs_end_long_ones_are_handed_back_and_their_streams_go_on(
    site: Site, worker: subprocess.Popen[bytes]
) -> None:
    short, long = site.run(8, max_tokens=SHORT), site.run(8, max_tokens=LONG)
    wait_until_shown(site, [*short, *long])
    worker.terminate()
    before = {job_id: site.log(job_id).numbers[-1] for job_id in long}
    (late,) = site.run()
    assert worker.wait(30) == 0
    for job_id in short:
        site.check_succeeded(job_id)
    for job_id in long:
        job = site.job(job_id)
        assert (job.status, job.attempt, job.deaths, job.handed_back) == ("queued", 1, 0, True)
        *shown, back = events_behind(site, job_id, before[job_id])
        assert len(shown) > 10 and {event.kind for event in shown} == {"tokens"}, "the stream stood still"
        assert (back.kind, back.data) == ("queued", {"status": "queued", "reason": "handed back by its worker"})
    assert (site.job(late).status, site.job(late).attempt) == ("queued", 0)
    with site.db.transaction() as session:
        assert session.scalars(select(Worker.id)).all() == []

    site.dispatch()
    successor = site.start_worker(2, echo_step_ms=0.0)
    site.wait_until([*long, late], "succeeded")
    for job_id in [*long, late]:
        site.check_succeeded(job_id)
    assert site.stop(successor) == 0


def test_a_second_word_ends_it_without_waiting(site: Site) -> None:
    worker = site.start_worker(3, echo_step_ms=10.0, drain_s=600.0)
    job_ids = site.run(SLOTS, max_tokens=LONG)
    wait_until_shown(site, job_ids)
    worker.terminate()
    site.wait_for(lambda: "takes no more jobs" in (site.settings.home / "engine3.log").read_text())
    worker.terminate()
    assert worker.wait(30) == 0
    assert site.statuses(job_ids) == {"queued": SLOTS}
    assert all(site.job(job_id).deaths == 0 for job_id in job_ids)
    for job_id in job_ids:
        site.cancel(job_id)
    with site.db.transaction() as session:
        assert session.scalars(select(tables.Job.id).where(tables.Job.status == "queued")).all() == []
