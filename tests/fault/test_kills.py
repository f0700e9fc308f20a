"""Workers killed with -9 under load: nothing lost, nothing twice, every stream whole."""

from __future__ import annotations

import random
import subprocess
import threading

import pytest
from sqlalchemy import text

from app.tiers import Tier
from tests.site import Site


class Reader:
    """Reads what is shown of all jobs, again and again, and notes where something shown was taken back."""

    def __init__(self, site: Site, job_ids: list[str]) -> None:
        self.retracted: list[tuple[str, str, str]] = []
        self.readings = 0
        self._site = site
        self._shown = dict.fromkeys(job_ids, "")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._stopped.wait(0.3):
            for job_id, shown in self._site.texts(self._shown.keys()).items():
                if not shown.startswith(self._shown[job_id]):
                    self.retracted.append((job_id, self._shown[job_id], shown))
                self._shown[job_id] = shown
            self.readings += 1


def runs_something(site: Site, process: subprocess.Popen[bytes]) -> bool:
    """Whether jobs of this worker have shown tokens in their present attempt."""
    worker = site.worker_of(process)
    if worker is None:
        return False
    with site.db.transaction() as session:
        return bool(session.scalar(_SHOWS_TOKENS, {"owner": worker.id}))


_SHOWS_TOKENS = text(
    """
    select exists (
        select from jobs join events on job_id = jobs.id
        where owner = :owner and kind = 'tokens'
        and number > (select max(number) from events where job_id = jobs.id and kind = 'running'))
    """
)


@pytest.mark.timeout(110)
@pytest.mark.parametrize(("jobs", "kills"), [(80, 4), pytest.param(200, 10, marks=pytest.mark.slow)])
def test_killed_workers_lose_nothing_and_do_nothing_twice(jobs: int, kills: int, site: Site) -> None:
    random.seed(1)
    pace = {"echo_step_ms": 20.0}
    io = site.start_io()
    workers = [site.start_worker(number, **pace) for number in (1, 2)]
    tiers = (Tier.PAID, Tier.FREE, Tier.BULK, Tier.BULK)
    job_ids = [
        job_id
        for group in range(jobs // 10)
        for job_id in site.submit(10, tier=tiers[group % 4], max_tokens=random.randint(60, 180))
    ]
    reader = Reader(site, job_ids)
    try:
        for kill in range(kills):
            victim = kill % 2
            site.wait_for(lambda: runs_something(site, workers[victim]))  # noqa: B023
            workers[victim].kill()
            workers[victim].wait()
            workers[victim] = site.spawn_worker(victim + 1, **pace)
        site.wait_until(job_ids, "succeeded", timeout_s=60)
    finally:
        reader.stop()
        for process in [io, *workers]:
            site.stop(process)

    for job_id in job_ids:
        site.check_succeeded(job_id)
    assert reader.readings > kills and reader.retracted == []
    assert sum(site.job(job_id).attempt > 1 for job_id in job_ids) >= kills, "the kills hit running jobs"
