"""A worker whose model takes its time to load, here a real one."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from app.children import last_line
from tests.site import Site
from tests.smollm2 import convert_once
from worker.vital import BROKEN


@contextmanager
def loading(site: Site, **settings: Any) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """A worker, and the process that loads its model."""
    worker = site.spawn_worker(7, model=str(convert_once()), **settings)
    found: list[psutil.Process] = []
    site.wait_for(lambda: found.extend(_lanes_of(worker)) or found)
    yield worker, found[0]
    site.wait_for(lambda: not found[0].is_running() or found[0].status() == psutil.STATUS_ZOMBIE)
    assert site.worker_of(worker) is None, "it never took part"


def _lanes_of(worker: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [child for child in psutil.Process(worker.pid).children() if "engine.lane" in child.cmdline()]


def test_a_worker_that_does_not_load_its_model_in_time_says_so_and_ends(site: Site) -> None:
    with loading(site, load_limit_s=0.2) as (worker, _):
        assert worker.wait(20) == BROKEN, site.tails()
    said = last_line(site.settings.home / "engine7.log")
    assert "was not loaded in 0.2 s (EVERBATCH_LOAD_LIMIT_S)" in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_worker_that_loads_its_model_ends_at_once_when_asked(site: Site, number: signal.Signals) -> None:
    with loading(site) as (worker, lane):
        lane.suspend()  # it would have loaded before long
        worker.send_signal(number)
        assert worker.wait(5) == 0, site.tails()
