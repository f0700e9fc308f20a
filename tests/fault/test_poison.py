"""A job that kills whoever computes it ends `failed`, and takes none of those with it that ran beside it."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from app.commands import engine_command
from app.tiers import Tier
from tests.fault.mortal import POISON
from tests.site import Site

MAX_DEATHS = 5
"""As by default."""
SLOTS = 32
"""All jobs fit beside each other."""


def spawn_mortal(site: Site, number: int) -> subprocess.Popen[bytes]:
    celery = engine_command(number)
    assert celery[:3] == [sys.executable, "-m", "celery"]
    command = [sys.executable, "-m", "tests.fault.mortal", *celery[3:]]
    return site.spawn(command, f"engine{number}", max_num_seqs=SLOTS, echo_step_ms=20.0)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_poison_job_fails_and_the_twenty_beside_it_succeed(site: Site) -> None:
    rng = random.Random(1)
    innocents = [
        job_id
        for number in range(20)
        for job_id in site.submit(tier=list(Tier)[number % 3], max_tokens=rng.randint(40, 120))
    ]
    (poison,) = site.submit(seed=POISON, max_tokens=20)
    io = site.start_io(max_deaths=MAX_DEATHS)
    workers = {number: spawn_mortal(site, number) for number in (1, 2)}
    deaths = 0

    def all_have_ended() -> bool:
        nonlocal deaths
        for number, process in workers.items():
            if process.poll() is not None:
                deaths += 1
                workers[number] = spawn_mortal(site, number)
        return site.statuses([*innocents, poison]).keys() <= {"succeeded", "failed"}

    site.wait_for(all_have_ended, timeout_s=150)
    assert site.statuses(innocents) == {"succeeded": 20}, site.tails()
    job = site.job(poison)
    assert job.status == "failed" and job.error is not None and job.error["code"] == "poison"
    assert job.deaths == MAX_DEATHS and site.log(poison).token_ids == []
    for job_id in innocents:
        site.check_succeeded(job_id)
    assert deaths == MAX_DEATHS
    assert sum(site.job(job_id).attempt > 1 for job_id in innocents) >= 10, "they ran beside it"
    for process in [io, *workers.values()]:
        site.stop(process)
