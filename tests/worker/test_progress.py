"""The writer of progress, on a database whose replies get lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from app import claims, tables
from app.db import Database
from app.ids import new_id
from app.tiers import Tier
from engine.request import Finish, Output
from tests.site import Site
from worker.attempts import Attempt, Attempts, Outcome, Task
from worker.logprobs import Speller
from worker.progress import ProgressWriter


class Deaf(Database):
    """Each of its next writes is committed, and the reply to it is lost."""

    lost_replies = 0

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        with super().transaction() as session:
            yield session
        self._lose_reply()

    @contextmanager
    def autocommit(self) -> Iterator[Session]:
        with super().autocommit() as session:
            yield session
        self._lose_reply()

    def _lose_reply(self) -> None:
        if self.lost_replies:
            self.lost_replies -= 1
            raise OperationalError("commit", {}, Exception("the connection was closed"))


class Idle:
    """An engine that nothing is asked of but to abort."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


class Silent:
    """Metrics that nobody reads."""

    registry = CollectorRegistry()

    def observe(self, *_: Any) -> None: ...

    def count_end(self, *_: Any) -> None: ...

    failed_writes = Counter("failed", "…", registry=None)


@pytest.fixture
def deaf(site: Site) -> Iterator[Deaf]:
    assert site.settings.database_url
    database = Deaf(site.settings.database_url)
    yield database
    database.close()


@pytest.fixture
def attempts() -> Attempts:
    return Attempts()


@pytest.fixture
def writer(site: Site, deaf: Deaf, attempts: Attempts) -> ProgressWriter:
    return ProgressWriter(
        deaf,
        site.redis,
        attempts,
        Idle(),  # type: ignore[arg-type]
        flush_interval_s=0.01,
        spelled=Speller(site.model.directory).spelled,
        on_ended=lambda: None,
        metrics=Silent(),  # type: ignore[arg-type]
    )


def claimed(site: Site, attempts: Attempts, **submission: Any) -> Attempt:
    owner = new_id("worker")
    (job_id,) = site.submit(**submission)
    with site.db.transaction() as session:
        session.add(tables.Worker(id=owner, model="echo", host="here", pid=0, slots=1))
    with site.db.transaction() as session:
        (claim,) = claims.claim(session, owner, {job_id: 1})
    task = Task(Tier.PAID, {job_id: 1}, on_claimed=lambda: None, on_done=lambda: None)
    attempt = Attempt(claim, owner, task, claimed_at=time.monotonic())
    attempts.add([attempt])
    return attempt


def test_a_job_does_not_end_without_the_tokens_that_a_lost_reply_left_unwritten(
    site: Site, deaf: Deaf, attempts: Attempts, writer: ProgressWriter
) -> None:
    attempt = claimed(site, attempts)
    deaf.lost_replies = 1
    (choice,) = attempt.outputs
    writer.on_outputs([Output(choice.request_id, (65,), "A", step=1)])
    site.wait_for(lambda: deaf.lost_replies == 0)  # the event stands, and the writer does not know it
    writer.on_outputs([Output(choice.request_id, (66,), "B", step=2, finish=Finish.LENGTH)])
    site.wait_for(lambda: attempt.task.is_done)
    assert writer.close(timeout_s=5)
    assert attempt.task.outcomes == {Outcome.LOST: 1}
    job = site.job(attempt.claim.job_id)
    assert (job.status, site.log(job.id).text) == ("running", "A"), "whoever finds it without an attempt goes on from A"


@pytest.mark.parametrize("is_end", [False, True])
def test_after_a_lost_reply_no_choice_has_a_token_twice(
    site: Site, deaf: Deaf, attempts: Attempts, writer: ProgressWriter, is_end: bool
) -> None:
    attempt = claimed(site, attempts, num_choices=3)
    first, second, third = attempt.outputs
    deaf.lost_replies = 1
    writer.on_outputs([Output(third.request_id, (65,), "A", step=1)])
    site.wait_for(lambda: deaf.lost_replies == 0)
    # The next write has the third choice's A again, and choices that were not in the first one.
    writer.on_outputs(
        [
            Output(first.request_id, (66,), "B", step=2, finish=Finish.LENGTH if is_end else None),
            Output(second.request_id, (67,), "C", step=2, finish=Finish.STOP if is_end else None),
            Output(third.request_id, (68,), "D", step=2, finish=Finish.STOP if is_end else None),
        ]
    )
    site.wait_for(lambda: attempt.task.is_done)
    assert writer.close(timeout_s=5)
    assert attempt.task.outcomes == {Outcome.LOST: 1} and site.job(attempt.claim.job_id).status == "running"
    kept = [site.log(attempt.claim.job_id, choice).text for choice in range(3)]
    assert kept[2] == "A" and set(kept[:2]) <= {"", "B", "C"}
    assert site.log(attempt.claim.job_id).numbers == list(range(1, len(site.log(attempt.claim.job_id).numbers) + 1))


def test_a_choice_that_cannot_be_computed_ends_its_job_and_the_others(
    site: Site, attempts: Attempts, writer: ProgressWriter
) -> None:
    attempt = claimed(site, attempts, num_choices=3)
    first, second, third = attempt.outputs
    writer.on_outputs(
        [
            Output(first.request_id, (65, 256), "A", step=1, finish=Finish.STOP),
            Output(second.request_id, (66,), "", step=1),
            Output(third.request_id, (), "", step=1, finish=Finish.ERROR, error="It broke."),
            Output(second.request_id, (67,), "C", step=2),
        ]
    )
    site.wait_for(lambda: attempt.task.is_done)
    assert writer.close(timeout_s=5)
    job = site.job(attempt.claim.job_id)
    assert (job.status, job.error) == ("failed", {"code": "engine_error", "message": "It broke."})
    assert [site.log(job.id, choice).token_ids for choice in range(3)] == [[65, 256], [66], []]
    assert job.completion_tokens == 3, "tokens without text are charged, what came after the end is not"
    assert second.request_id in writer._engine.aborted  # type: ignore[attr-defined]
