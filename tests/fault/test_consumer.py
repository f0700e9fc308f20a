"""Consumers that Redis lost: they come back by themselves, or their worker ends and the next one takes over."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from app import tables
from app.children import wait_until
from app.commands import engine_command, io_command
from app.db import migrate
from app.embedded import Servers
from app.settings import Settings
from tests.fault.crashing import Spoiled
from tests.site import Site, echo_site
from worker.consumer import LEAVE_S, READY_S
from worker.vital import BROKEN

SLOWLY = {"echo_step_ms": 20.0}
"""8000 tokens then take 160 s."""
HEAL_S = 60.0
"""A promise: every single fault heals within so long, without hands."""


@pytest.fixture(scope="module")
def servers(make_home: Callable[[], Path]) -> Iterator[Servers]:
    """Of this module's own: Redis will suffer."""
    with Servers.start(Settings(home=make_home(), database_url=None, redis_url=None)) as servers:
        migrate(servers.database_url)
        yield servers


@pytest.fixture(scope="module")
def own(servers: Servers, make_home: Callable[[], Path]) -> Iterator[Site]:
    site = echo_site(make_home(), servers.database_url, servers.redis_url, dispatch_interval_s=0.2)
    yield site
    site.close()


UNACKNOWLEDGED = Spoiled("skip", "celery.worker.request:Request.acknowledge")


def signal_redis(servers: Servers, number: signal.Signals) -> None:
    assert servers.valkey is not None and servers.valkey.pid is not None
    subprocess.run(["kill", f"-{int(number)}", str(servers.valkey.pid)], check=True)


def restart_redis(servers: Servers) -> None:
    signal_redis(servers, signal.SIGKILL)
    assert servers.valkey is not None
    assert wait_until(lambda: servers.valkey is not None and servers.valkey.pid is None, 5)
    servers.restart_dead()
    assert wait_until(servers.valkey.answers, 5)


def is_ready(site: Site, process: subprocess.Popen[bytes]) -> tuple[bool, bool, bool]:
    """What its row says, its /readyz, and its metric."""
    worker = site.worker_of(process)
    assert worker is not None and worker.metrics_url is not None, site.tails()
    probe = httpx.get(worker.metrics_url.replace("/metrics", "/readyz"), trust_env=False).status_code == 200
    metric = "\neverbatch_ready 1.0" in httpx.get(worker.metrics_url, trust_env=False).text
    return worker.ready, probe, metric


@contextmanager
def running(site: Site, mark: Path, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A worker, and an io worker beside it; neither is started again.

    The worker acknowledges nothing: when Redis is lost, it holds messages that it should, as others may for an instant.
    """
    io = site.start_io()
    worker = site.spawn(UNACKNOWLEDGED.command(engine_command(1), mark), "engine1", **settings)
    site.wait_for(lambda: site.worker_of(worker) is not None)
    yield worker
    assert io.poll() is None, site.tails()
    assert (site.stop(worker), site.stop(io)) == (0, 0)


def check_goes_on(site: Site, worker: subprocess.Popen[bytes]) -> None:
    """Twenty jobs run to their end, in the process that was there before."""
    job_ids = site.submit(20)
    site.wait_until(job_ids, "succeeded", timeout_s=HEAL_S)
    for job_id in job_ids:
        site.check_succeeded(job_id)
    assert worker.poll() is None, site.tails()
    assert is_ready(site, worker) == (True, True, True)


@pytest.mark.slow
def test_a_worker_takes_jobs_again_after_redis_lost_it_three_times_in_three_seconds(
    servers: Servers, own: Site, tmp_path: Path
) -> None:
    with running(own, tmp_path / "mark") as worker:
        began = time.monotonic()
        running_jobs = own.run(8, max_tokens=2000)
        own.wait_until(running_jobs, "running")
        for round in range(3):
            time.sleep(max(0.0, began + round - time.monotonic()))  # a beat of the fault, not a condition
            own.redis.client_kill_filter(_type="normal", skipme=True)
            restart_redis(servers)
        check_goes_on(own, worker)
        own.wait_until(running_jobs, "succeeded", timeout_s=HEAL_S)
        assert {own.job(job_id).attempt for job_id in running_jobs} == {1}, "nothing was run again"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "killed"])
def test_while_redis_is_away_a_worker_is_not_ready_and_goes_on_with_what_runs(
    servers: Servers, own: Site, frozen: bool, tmp_path: Path
) -> None:
    with running(own, tmp_path / "mark", **SLOWLY) as worker:
        (long,) = own.run(max_tokens=8000)
        own.wait_until([long], "running")
        signal_redis(servers, signal.SIGSTOP if frozen else signal.SIGKILL)
        own.wait_for(lambda: is_ready(own, worker) == (False, False, False), timeout_s=READY_S + 5)
        shown = len(own.log(long).numbers)
        time.sleep(LEAVE_S + 5)  # longer than a worker waits that could do something about it
        assert worker.poll() is None and len(own.log(long).numbers) > shown, own.tails()
        if frozen:
            signal_redis(servers, signal.SIGCONT)
        else:
            servers.restart_dead()
        check_goes_on(own, worker)
        own.cancel(long)


def ready_workers(site: Site) -> int:
    with site.db.transaction() as session:
        return len(session.scalars(select(tables.Worker.id).where(~tables.Worker.dead, tables.Worker.ready)).all())


HUNG = {
    "a consumer that says it is connected and asks for nothing": Spoiled(
        "skip", "kombu.transport.redis:MultiChannelPoller._register_BRPOP", 50
    ),
    "a hub that hangs": Spoiled("hang", "kombu.transport.redis:Channel._brpop_start", 50),
}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("spoiled", HUNG.values(), ids=HUNG.keys())
def test_a_worker_whose_consumer_hangs_hands_back_and_ends_and_the_next_one_takes_over(
    own: Site, spoiled: Spoiled, tmp_path: Path
) -> None:
    mark = tmp_path / "hung"
    early = dataclasses.replace(spoiled, count=3)  # the io worker asks once a second only
    io = own.spawn(early.command(io_command(), tmp_path / "io hung"), "io")
    hung = own.spawn(spoiled.command(engine_command(1), mark), "engine1", **SLOWLY)
    own.wait_for(lambda: own.worker_of(hung) is not None)
    job_ids = own.run(4, max_tokens=8000)
    own.wait_until(job_ids, "running")
    own.wait_for(mark.exists)
    own.wait_for(lambda: is_ready(own, hung) == (False, False, False), timeout_s=READY_S + 5)
    own.wait_for(lambda: hung.poll() is not None and io.poll() is not None, timeout_s=LEAVE_S + 10)
    assert (hung.returncode, io.returncode) == (BROKEN, BROKEN)
    assert own.statuses(job_ids) == {"queued": 4} and ready_workers(own) == 0, "handed back, not left to the lease"
    with running(own, tmp_path / "mark", **SLOWLY) as worker:
        own.wait_until(job_ids, "running")
        assert {own.job(job_id).attempt for job_id in job_ids} == {2}
        for job_id in job_ids:
            own.cancel(job_id)
        check_goes_on(own, worker)
