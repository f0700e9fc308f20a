"""Threads that a worker cannot live without, and how it ends when something is beyond repair."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

logger = logging.getLogger(__name__)

BROKEN = 70
"""The exit code (EX_SOFTWARE) of a worker that ended itself; a new start helps."""


def vital_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """Start a thread whose death by an exception ends the process.

    A worker with a dead part would hold its jobs for ever while its heartbeat goes on. Dead as a whole, its lease runs
    out and its jobs resume elsewhere.
    """

    def run_or_end() -> None:
        try:
            run()
        except BaseException:
            logger.critical("the %s died, and the worker ends with it", name, exc_info=True)
            end_process()

    thread = threading.Thread(target=run_or_end, name=name, daemon=True)
    thread.start()
    return thread


@contextmanager
def time_limit(seconds: float, complaint: str) -> Iterator[None]:
    """The block may take so long; a process that is still in it then says the complaint and ends.

    It is ended from another thread: what takes too long may be a call that no exception reaches.
    """

    def end() -> None:
        logger.critical("%s", complaint)
        end_process()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_process() -> NoReturn:
    """End at once: no clean-up can be trusted any more, and Postgres needs none."""
    logging.shutdown()
    os._exit(BROKEN)
