"""States, fences and events of jobs, on a real database."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import undefer

from app import claims, events, jobs, moves, recovery, tables
from app.claims import Finished
from app.db import Database
from app.errors import Conflict, NotFound, QueueFull
from app.events import Event
from app.jobs import Submission
from app.moves import TERMINAL, TRANSITIONS, Move, Status
from app.tables import NOW, Job
from app.tiers import Tier
from tests import submitting


def log(db: Database, job_id: str) -> list[Event]:
    with db.transaction() as session:
        return events.replay(session, job_id, 0)


def kinds(db: Database, job_id: str) -> list[str]:
    return [event.kind for event in log(db, job_id)]


def load(db: Database, job_id: str) -> Job:
    with db.transaction() as session:
        return session.scalars(select(Job).where(Job.id == job_id).options(undefer("*"))).one()


def put(db: Database, job_id: str, **columns: Any) -> None:
    with db.transaction() as session:
        session.execute(update(Job).where(Job.id == job_id).values(**columns))


# ---- transitions


@pytest.mark.parametrize("to", Status)
@pytest.mark.parametrize("start", Status)
def test_only_the_tables_transitions_are_moved(
    db: Database, submit: Any, worker: Any, start: Status, to: Status
) -> None:
    job_id = submit()
    put(db, job_id, status=start.value, owner=worker.id if start is Status.RUNNING else None)

    def move() -> None:
        with db.transaction() as session:
            moves.lock(session, [job_id])
            moves.move(session, [Move(job_id, owner=worker.id if to is Status.RUNNING else None)], to)

    if to in TRANSITIONS[start]:
        move()
        job = load(db, job_id)
        assert job.status == to
        assert (job.owner is not None) == (to is Status.RUNNING)
        assert (job.finished_at is not None) == (to in TERMINAL)
        assert kinds(db, job_id) == ["queued", to.value]
    else:
        with pytest.raises(AssertionError):
            move()
        assert load(db, job_id).status == start
        assert kinds(db, job_id) == ["queued"]


def test_a_terminal_status_is_for_ever() -> None:
    assert {status for status in Status if not TRANSITIONS[status]} == TERMINAL


def test_a_jobs_life_is_told_by_its_events(db: Database, submit: Any, worker: Any) -> None:
    job_id = submit()
    worker.run(job_id, "ab", "c")
    assert [(event.number, event.kind, event.data) for event in log(db, job_id)] == [
        (1, "queued", {"status": "queued"}),
        (2, "running", {"status": "running", "attempt": 1}),
        (3, "tokens", {"index": 0, "text": "ab"}),
        (4, "tokens", {"index": 0, "text": "c"}),
        (
            5,
            "succeeded",
            {
                "status": "succeeded",
                "finish_reason": "stop",
                "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
                "error": None,
            },
        ),
    ]
    job = load(db, job_id)
    assert (job.output_text, job.completion_tokens, job.finish_reason) == ("abc", 3, "stop")


# ---- submit


def test_a_full_queue_refuses_until_one_job_ends(db: Database, owner: Any, submit: Any, submission: Submission) -> None:
    first = submit()
    with db.transaction() as session:
        submitting.submit(session, owner.tenant_id, submission, max_queued=2)
    with pytest.raises(QueueFull), db.transaction() as session:
        submitting.submit(session, owner.tenant_id, submission, max_queued=2)
    with db.transaction() as session:
        jobs.cancel(session, owner.tenant_id, first)
        submitting.submit(session, owner.tenant_id, submission, max_queued=2)


# ---- claim


def test_a_duplicate_message_claims_nothing(submit: Any, new_worker: Any) -> None:
    job_id = submit()
    assert [claim.job_id for claim in new_worker().claim(job_id)] == [job_id]
    assert new_worker().claim(job_id) == []


def test_one_claim_of_many_at_once_wins(db: Database, submit: Any, new_worker: Any) -> None:
    job_ids = [submit() for _ in range(5)]
    workers = [new_worker() for _ in range(8)]
    barrier = threading.Barrier(len(workers))

    def claim(worker: Any) -> list[str]:
        barrier.wait()
        return [claim.job_id for claim in worker.claim(*job_ids)]

    with ThreadPoolExecutor(len(workers)) as pool:
        won = [job_id for claimed in pool.map(claim, workers) for job_id in claimed]
    assert sorted(won) == sorted(job_ids)
    for job_id in job_ids:
        assert load(db, job_id).attempt == 1
        assert kinds(db, job_id) == ["queued", "running"]


def test_a_worker_that_was_declared_dead_claims_nothing(submit: Any, worker: Any) -> None:
    worker.die()
    assert worker.claim(submit()) == []


def test_a_new_attempt_gets_the_tokens_of_the_ones_before(db: Database, submit: Any, new_worker: Any) -> None:
    job_id = submit()
    first, second = new_worker(), new_worker()
    (claim,) = first.claim(job_id)
    first.write(claim, "ab", 3)
    first.write(claim, "c", 4)
    with db.transaction() as session:
        claims.hand_back(session, first.id, [job_id])
    (resumed,) = second.claim(job_id)
    assert resumed.attempt == 2
    assert resumed.begun[0].token_ids == tuple(b"abc")
    assert resumed.last_event == 6
    assert resumed.prompt_ids == claim.prompt_ids
    assert resumed.sampling == claim.sampling


# ---- fences


def test_a_zombie_writes_and_ends_nothing(db: Database, submit: Any, new_worker: Any) -> None:
    job_id = submit()
    zombie, heir = new_worker(), new_worker()
    (old,) = zombie.claim(job_id)
    zombie.write(old, "ab", 3)
    zombie.die()
    with db.transaction() as session:
        recovery.requeue_orphans(session, max_deaths=3)
    assert zombie.write(old, "XX", 4) == []  # while the job waits
    assert zombie.finish(old) == []
    (new,) = heir.claim(job_id)
    assert zombie.write(old, "XX", 6) == []  # and while somebody else runs it
    assert zombie.finish(old) == []
    with db.transaction() as session:
        assert claims.hand_back(session, zombie.id, [job_id]) == []
    heir.write(new, "cd", 6)
    heir.finish(new)
    assert load(db, job_id).output_text == "abcd"
    assert kinds(db, job_id) == ["queued", "running", "tokens", "queued", "running", "tokens", "succeeded"]


def test_the_same_workers_older_attempt_is_fenced_too(db: Database, submit: Any, worker: Any) -> None:
    job_id = submit()
    (old,) = worker.claim(job_id)
    with db.transaction() as session:
        claims.hand_back(session, worker.id, [job_id])
    (new,) = worker.claim(job_id)
    assert worker.write(old, "X", 5) == []
    assert worker.finish(old) == []
    assert worker.write(new, "a", 5) != []


def test_a_second_end_has_no_effect(db: Database, submit: Any, worker: Any) -> None:
    job_id = submit()
    (claim,) = worker.claim(job_id)
    assert len(worker.finish(claim)) == 1
    assert worker.finish(claim, Status.FAILED) == []
    assert load(db, job_id).status == "succeeded"


def test_last_tokens_without_text_are_kept_and_charged(db: Database, submit: Any, worker: Any) -> None:
    job_id = submit()
    (claim,) = worker.claim(job_id)
    worker.write(claim, "ab", 3)
    worker.end(claim, "", 4, token_ids=[256])
    job = load(db, job_id)
    assert (job.output_text, job.completion_tokens) == ("ab", 3)


def test_a_failed_attempt_ends_the_job_with_its_error(db: Database, submit: Any, worker: Any) -> None:
    job_id = submit()
    (claim,) = worker.claim(job_id)
    error = {"code": "engine_error", "message": "It broke."}
    with db.transaction() as session:
        (event,) = claims.finish(session, worker.id, [Finished(job_id, 1, Status.FAILED, error=error)])
    assert event.data["error"] == error
    assert load(db, job_id).error == error
    assert claim.attempt == 1


# ---- cancel and delete


def test_from_the_commit_of_a_cancel_nothing_is_shown(db: Database, owner: Any, submit: Any, worker: Any) -> None:
    job_id = submit()
    (claim,) = worker.claim(job_id)
    worker.write(claim, "ab", 3)
    with db.transaction() as session:
        job, (event,) = jobs.cancel(session, owner.tenant_id, job_id)
        assert (job.output_text, job.completion_tokens) == ("ab", 2)
    assert (event.number, event.kind) == (4, "cancelled")
    assert worker.write(claim, "X", 4) == []
    assert worker.finish(claim) == []
    assert kinds(db, job_id)[-1] == "cancelled"


@pytest.mark.parametrize("status", [Status.SUCCEEDED, Status.FAILED])
def test_a_job_that_ended_by_itself_cannot_be_cancelled(
    db: Database, owner: Any, submit: Any, worker: Any, status: Status
) -> None:
    job_id = submit()
    (claim,) = worker.claim(job_id)
    worker.finish(claim, status)
    with pytest.raises(Conflict), db.transaction() as session:
        jobs.cancel(session, owner.tenant_id, job_id)


def test_nobody_cancels_or_deletes_somebody_elses_job(db: Database, new_tenant: Any, submit: Any) -> None:
    job_id, stranger = submit(), new_tenant()
    for act in (jobs.cancel, jobs.remove, jobs.find):
        with pytest.raises(NotFound), db.transaction() as session:
            act(session, stranger.tenant_id, job_id)  # type: ignore[operator]
    assert load(db, job_id).status == "queued"


def test_a_deleted_job_takes_its_events_with_it(db: Database, owner: Any, submit: Any, worker: Any) -> None:
    job_id = submit()
    (claim,) = worker.claim(job_id)
    with db.transaction() as session:
        (event,) = jobs.remove(session, owner.tenant_id, job_id)
    assert event.kind == "cancelled"
    assert log(db, job_id) == []
    assert worker.write(claim, "X", 3) == []
    assert worker.finish(claim) == []


def test_numbers_have_no_gap_whoever_writes_at_once(db: Database, owner: Any, submit: Any, new_worker: Any) -> None:
    """A writer, a hand-back and a cancel race for the next event number of each of many jobs."""
    job_ids = [submit() for _ in range(8)]

    def write(job_id: str) -> None:
        """Attempt after attempt, two events each, until the job is gone from the queue."""
        while True:
            worker = new_worker()
            claimed = worker.claim(job_id)
            if not claimed:
                if load(db, job_id).status == "cancelled":
                    return
                continue
            (claim,) = claimed
            for number in (claim.last_event + 1, claim.last_event + 2):
                worker.write(claim, "ab", number)
            with db.transaction() as session:
                claims.hand_back(session, worker.id, [job_id])

    def cancel(job_id: str) -> None:
        while len(log(db, job_id)) < 8:
            threading.Event().wait(0.002)
        with db.transaction() as session:
            jobs.cancel(session, owner.tenant_id, job_id)

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(act, job_id) for job_id in job_ids for act in (write, cancel)]:
            done.result()
    for job_id in job_ids:
        told = log(db, job_id)
        assert [event.number for event in told] == list(range(1, len(told) + 1))
        assert [event.kind for event in told if event.ends_log] == ["cancelled"]
        assert told[-1].kind == "cancelled"
        shown = "".join(event.data["text"] for event in told if event.kind == "tokens")
        job = load(db, job_id)
        assert job.output_text == shown
        assert job.completion_tokens == len(shown)


# ---- the sweep


def die_with(db: Database, new_worker: Any, job_id: str, *texts: str) -> list[Event]:
    """One attempt that writes texts and whose worker then dies."""
    worker = new_worker()
    (claim,) = worker.claim(job_id)
    for number, text in enumerate(texts, claim.last_event + 1):
        worker.write(claim, text, number)
    worker.die()
    with db.transaction() as session:
        return recovery.requeue_orphans(session, max_deaths=3)


def test_the_job_of_a_dead_worker_goes_back_to_the_front(db: Database, submit: Any, new_worker: Any) -> None:
    job_id = submit()
    (event,) = die_with(db, new_worker, job_id)
    assert (event.kind, event.data["reason"]) == ("queued", "its worker was lost")
    job = load(db, job_id)
    assert (job.status, job.deaths, job.handed_back, job.dispatch_number) == ("queued", 1, True, None)


def test_a_job_that_kills_worker_after_worker_fails_as_poison(db: Database, submit: Any, new_worker: Any) -> None:
    job_id = submit()
    ends = [die_with(db, new_worker, job_id)[0].kind for _ in range(3)]
    assert ends == ["queued", "queued", "failed"]
    assert (load(db, job_id).error or {})["code"] == "poison"


def test_progress_between_deaths_sets_the_count_back(db: Database, submit: Any, new_worker: Any) -> None:
    job_id = submit()
    deaths = []
    for texts in ([], [], ["a"], [], ["b", "c"], [], [], []):
        die_with(db, new_worker, job_id, *texts)
        deaths.append((load(db, job_id).deaths, load(db, job_id).status))
    #                            no text  again  progress  none  progress  none  none  none: the third in a row
    assert [count for count, _ in deaths] == [1, 2, 0, 1, 0, 1, 2, 3]
    assert [status for _, status in deaths] == ["queued"] * 7 + ["failed"]


def test_a_job_that_only_waited_in_the_engine_is_not_blamed(db: Database, submit: Any, new_worker: Any) -> None:
    """Two slots. The batch is the paid job and, of the free ones, the one that was dispatched first."""
    worker = new_worker(slots=2)
    bulk, late, early, paid = submit(tier=Tier.BULK), submit(tier=Tier.FREE), submit(tier=Tier.FREE), submit()
    for number, job_id in enumerate([early, late, bulk, paid]):
        worker.claim(job_id, number=number)
    worker.die()
    with db.transaction() as session:
        recovery.requeue_orphans(session, max_deaths=3)
    assert [load(db, job_id).deaths for job_id in (paid, early, late, bulk)] == [1, 1, 0, 0]


def test_a_hand_back_is_no_death(db: Database, submit: Any, worker: Any) -> None:
    job_id = submit()
    for _ in range(5):
        worker.claim(job_id)
        with db.transaction() as session:
            claims.hand_back(session, worker.id, [job_id])
    job = load(db, job_id)
    assert (job.deaths, job.attempt, job.status) == (0, 5, "queued")


@pytest.mark.parametrize("running", [False, True])
def test_a_deadline_ends_a_job(db: Database, submit: Any, worker: Any, expire_now: Any, running: bool) -> None:
    job_id, other = submit(), submit()
    claims = worker.claim(job_id) if running else []
    expire_now(job_id)
    with db.transaction() as session:
        (event,) = recovery.expire(session)
    assert (event.job_id, event.kind, event.data["error"]["code"]) == (job_id, "expired", "deadline_exceeded")
    assert [worker.finish(claim) for claim in claims] in ([], [[]])
    assert load(db, other).status == "queued"


@pytest.mark.parametrize(
    ("queue_is_empty", "claimed", "age_s", "lost"),
    [
        (True, None, 10, True),  # no message waits, so its own is gone
        (False, None, 10, False),  # its message may be among those that wait
        (False, 6, 10, False),  # an older message was read last: its own is still behind it
        (False, 8, 10, True),  # a younger message was read, so its own is gone
        (True, None, 0, False),  # it may be on its way
    ],
)
def test_a_lost_message_is_noticed(
    db: Database, submit: Any, worker: Any, queue_is_empty: bool, claimed: int | None, age_s: int, lost: bool
) -> None:
    model = f"lost-{queue_is_empty}-{claimed}-{age_s}"
    job_id = submit(model=model)
    put(db, job_id, dispatch_number=7, dispatched_at=NOW - timedelta(seconds=age_s))
    if claimed is not None:
        worker.claim(submit(model=model), number=claimed)
    with db.transaction() as session:
        count = recovery.forget_lost_messages(session, model, Tier.PAID, queue_is_empty=queue_is_empty, grace_s=5)
    assert count == int(lost)
    assert load(db, job_id).dispatch_number == (None if lost else 7)


def test_a_moves_event_and_row_stand_or_fall_together(db: Database, owner: Any, submit: Any) -> None:
    job_id = submit()

    class Crash(Exception):
        pass

    with pytest.raises(Crash), db.transaction() as session:
        jobs.cancel(session, owner.tenant_id, job_id)
        raise Crash
    assert load(db, job_id).status == "queued"
    assert kinds(db, job_id) == ["queued"]


def test_a_webhook_is_written_once_and_with_the_end(db: Database, owner: Any, submit: Any) -> None:
    job_id = submit(webhook_url="https://example.com/")
    count = select(func.count()).select_from(tables.Delivery).where(tables.Delivery.job_id == job_id)
    for expected in (0, 1, 1):
        with db.transaction() as session:
            assert session.scalar(count) == expected
            jobs.cancel(session, owner.tenant_id, job_id)
