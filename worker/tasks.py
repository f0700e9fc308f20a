"""The body of the engine worker's Celery task. Celery's own trace runs around them, for signals, events and results."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from celery.exceptions import Ignore

from worker.attempts import Outcome, Task

DONE_TASK: ContextVar[Task] = ContextVar("done_task")
"""The message whose jobs have ended, in the thread that traces it."""


class JobsFailed(Exception):
    """Some jobs of the message failed; why stands with each job."""


def generate(jobs: list[list[Any]]) -> dict[str, int]:
    """Report what became of the jobs: they have run by now, in the engine, as the pool saw to.

    Returns the number of jobs by outcome. Raises Ignore when none of them ended by this message, JobsFailed when any
    failed: the job rows are the result, this is for those who watch Celery.
    """
    outcomes = DONE_TASK.get().outcomes
    if outcomes[Outcome.FAILED]:
        raise JobsFailed(f"{outcomes[Outcome.FAILED]} of {len(jobs)} jobs failed")
    if not outcomes[Outcome.SUCCEEDED]:
        raise Ignore
    return {outcome.value: count for outcome, count in outcomes.items()}
