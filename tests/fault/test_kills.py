"""Workers killed with -9 under load: nothing lost, nothing twice, every stream whole."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Collection

import pytest
from sqlalchemy import text

from app.tiers import Tier
from tests.site import Site


class Reader:
    """Reads what is shown of all jobs, again and again, and notes what is no part of an undisturbed run's text."""

    def __init__(self, site: Site, job_ids: list[str]) -> None:
        self.wrong: list[tuple[str, str, str]] = []
        """Job, what had been shown of it, and what was shown then."""
        self.readings = 0
        self._site = site
        self._whole = {job_id: bytes(site.expected(job_id)).decode() for job_id in job_ids}
        self._shown = dict.fromkeys(job_ids, "")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read_on)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._read(self._shown)

    def _read_on(self) -> None:
        while not self._stopped.wait(0.3):
            self._read([job_id for job_id, shown in self._shown.items() if shown != self._whole[job_id]])

    def _read(self, job_ids: Collection[str]) -> None:
        for job_id, shown in self._site.texts(job_ids).items():
            if not (shown.startswith(self._shown[job_id]) and self._whole[job_id].startswith(shown)):
                self.wrong.append((job_id, self._shown[job_id], shown))
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


@pytest.mark.parametrize(
    ("jobs", "kills", "step_ms", "longest_s"),
    [(40, 2, 20.0, 0.5), pytest.param(2000, 200, 80.0, 3.0, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_killed_workers_lose_nothing_and_do_nothing_twice(
    jobs: int, kills: int, step_ms: float, longest_s: float, site: Site
) -> None:
    """Two workers, killed in turns, each at a random moment after it began to run something.

    Poison is judged by odds (docs/decisions/who-is-poison.md), and so many kills are against the odds of an innocent
    job: here it takes more deaths to condemn one, for this is about all other promises.

    step_ms  while there are kills: so long that enough jobs are left to the last of them
    """
    rng = random.Random(1)
    tenant = site.new_tenant(f"with {jobs} jobs")
    io = site.start_io(max_deaths=12)
    workers = [site.start_worker(number, echo_step_ms=step_ms) for number in (1, 2)]
    tiers = (Tier.PAID, Tier.FREE, Tier.BULK, Tier.BULK)
    job_ids = [
        job_id
        for group in range(jobs // 10)
        for job_id in site.submit(
            10, tier=tiers[group % 4], tenant_id=tenant.tenant_id, deadline_s=7200.0, max_tokens=rng.randint(60, 180)
        )
    ]
    reader = Reader(site, job_ids)
    try:
        for kill in range(kills):
            victim = kill % 2
            site.wait_for(lambda: runs_something(site, workers[victim]), timeout_s=60)  # noqa: B023
            time.sleep(rng.uniform(0.0, longest_s))
            workers[victim].kill()
            workers[victim].wait()
            pace_ms = step_ms if kill < kills - 2 else 20.0
            workers[victim] = site.spawn_worker(victim + 1, echo_step_ms=pace_ms)
        site.wait_until(job_ids, "succeeded", timeout_s=60 + jobs / 4)
        site.wait_until_settled()
    finally:
        reader.stop()
        for process in [io, *workers]:
            site.stop(process)

    for job_id in job_ids:
        site.check_succeeded(job_id)
    site.check_bill(tenant.tenant_id, job_ids)
    assert reader.readings > kills and reader.wrong == []
    assert sum(site.job(job_id).attempt - 1 for job_id in job_ids) >= kills, "the kills hit running jobs"
