"""Jobs with several choices, or with logprobs: told by their events, resumed from them, charged as one job."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import undefer

from app import choices, claims, events, jobs, usage
from app.choices import Choice
from app.claims import Begun, Claim, Finished
from app.completions import completion_object
from app.db import Database
from app.events import Delta, Event
from app.logprobs import TokenLogprob, pack
from app.moves import Status
from app.settlements import day_of, usage_of
from app.tables import Job

SAMPLING = {"max_tokens": 4, "seed": 7}
LIKELY = [TokenLogprob(bytes([byte]), -byte / 64, ((b"?", -0.5),)) for byte in b"abcdef"]


def told(db: Database, job_id: str, **options: bool) -> tuple[Job, list[Choice]]:
    with db.transaction() as session:
        job = session.scalars(select(Job).where(Job.id == job_id).options(undefer(Job.output_text))).one()
        jobs.add_progress(session, [job])
        return job, choices.of(session, [job], **options)[job_id]


def write(db: Database, worker: Any, claim: Claim, *news: tuple[int, str, str | None], after: int) -> list[Event]:
    """Persist a text, and perhaps the end, of choices, in one statement."""
    deltas = [
        Delta(claim.job_id, claim.attempt, number, text, tuple(text.encode()), choice, finish_reason)
        for number, (choice, text, finish_reason) in enumerate(news, after + 1)
    ]
    with db.transaction() as session:
        return events.append_tokens(session, worker.id, deltas)


def finish(db: Database, worker: Any, claim: Claim, status: Status = Status.SUCCEEDED) -> None:
    with db.transaction() as session:
        assert claims.finish(session, worker.id, [Finished(claim.job_id, claim.attempt, status, "length")])


def test_each_choice_is_told_by_its_own_events(db: Database, submit: Callable[..., str], worker: Any) -> None:
    job_id = submit(num_choices=3, sampling=SAMPLING)
    assert told(db, job_id)[1] == [Choice(0), Choice(1), Choice(2)]
    (claim,) = worker.claim(job_id)
    assert claim.begun == (Begun(), Begun(), Begun())
    shown = write(db, worker, claim, (2, "x", None), (0, "ab", None), after=2)
    shown += write(db, worker, claim, (1, "", "stop"), (0, "cd", "length"), (2, "y", None), after=4)
    assert [event.data for event in shown] == [
        {"index": 2, "text": "x"},
        {"index": 0, "text": "ab"},
        {"index": 1, "text": "", "finish_reason": "stop"},
        {"index": 0, "text": "cd", "finish_reason": "length"},
        {"index": 2, "text": "y"},
    ]
    running, so_far = told(db, job_id)
    assert so_far == [Choice(0, "abcd", "length"), Choice(1, "", "stop"), Choice(2, "xy")]
    assert (running.completion_tokens, running.output_text) == (6, "abcd")

    write(db, worker, claim, (2, "z", "stop"), after=7)
    finish(db, worker, claim)
    job, ended = told(db, job_id)
    assert ended == [Choice(0, "abcd", "length"), Choice(1, "", "stop"), Choice(2, "xyz", "stop")]
    assert (job.output_text, job.finish_reason) == ("abcd", "length")
    assert usage_of(job) == {"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9}
    with db.transaction() as session:
        replayed = events.replay(session, job_id, after=2)
    assert [event.data for event in replayed[:5]] == [event.data for event in shown]
    assert replayed[-1].data["usage"] == usage_of(job)


def test_the_next_attempt_goes_on_with_each_choice_where_it_was(
    db: Database, submit: Callable[..., str], worker: Any
) -> None:
    job_id = submit(num_choices=3, sampling=SAMPLING)
    (claim,) = worker.claim(job_id)
    write(db, worker, claim, (1, "ab", None), (2, "x", "stop"), after=2)
    write(db, worker, claim, (1, "c", None), after=4)
    with db.transaction() as session:
        claims.hand_back(session, worker.id, [job_id])
    (resumed,) = worker.claim(job_id)
    assert resumed.begun == (Begun(), Begun(tuple(b"abc")), Begun(tuple(b"x"), "stop"))


def test_a_cancelled_job_keeps_and_is_charged_what_all_its_choices_showed(
    db: Database, submit: Callable[..., str], worker: Any, owner: Any
) -> None:
    job_id = submit(num_choices=2, sampling=SAMPLING)
    (claim,) = worker.claim(job_id)
    write(db, worker, claim, (0, "ab", None), (1, "c", "stop"), after=2)
    with db.transaction() as session:
        jobs.cancel(session, owner.tenant_id, job_id)
    assert write(db, worker, claim, (0, "z", None), after=4) == []
    job, kept = told(db, job_id)
    assert kept == [Choice(0, "ab"), Choice(1, "c", "stop")]
    assert job.finished_at is not None
    with db.transaction() as session:
        (day,) = usage.usage(session, owner.tenant_id, day_of(job.finished_at), day_of(job.finished_at))
    assert (day.jobs, day.prompt_tokens, day.completion_tokens) == (1, 2, 3)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_logprobs_are_the_same_live_replayed_and_in_the_result(
    db: Database, submit: Callable[..., str], worker: Any, num_choices: int
) -> None:
    job_id = submit(num_choices=num_choices, sampling=SAMPLING | {"top_logprobs": 1})
    (claim,) = worker.claim(job_id)
    last = num_choices - 1

    def delta(number: int, part: Sequence[TokenLogprob], finish_reason: str | None = None) -> Delta:
        text = b"".join(each.token for each in part)
        return Delta(job_id, 1, number, text.decode(), tuple(text), last, finish_reason, pack(part))

    with db.transaction() as session:
        live = events.append_tokens(session, worker.id, [delta(3, LIKELY[:2]), delta(4, LIKELY[2:], "length")])
    finish(db, worker, claim)
    entry = {"token": "a", "logprob": -97 / 64, "bytes": [97]}
    likely = {"token": "?", "logprob": -0.5, "bytes": [63]}
    assert live[0].data["logprobs"]["content"][0] == entry | {"top_logprobs": [likely]}
    with db.transaction() as session:
        replayed = events.replay(session, job_id, after=2, limit=2)
    assert [json.dumps(event.data, sort_keys=True) for event in replayed] == [
        json.dumps(event.data, sort_keys=True) for event in live
    ]
    job, ended = told(db, job_id)
    assert ended[last] == Choice(last, "abcdef", "length", tuple(LIKELY))
    assert [choice.logprobs for choice in ended[:last]] == [()] * last
    assert [choice.logprobs for choice in told(db, job_id, with_logprobs=False)[1]] == [None] * num_choices

    chat = completion_object(job, ended, "/v1/chat/completions")["choices"][last]
    assert [each["token"] for each in chat["logprobs"]["content"]] == list("abcdef")
    assert (chat["message"]["content"], chat["logprobs"]["refusal"]) == ("abcdef", None)
    plain = completion_object(job, ended, "/v1/completions")["choices"][last]
    assert plain["logprobs"]["tokens"] == list("abcdef") and plain["logprobs"]["text_offset"] == list(range(6))
    assert [(each["index"], each["finish_reason"]) for each in (chat, plain)] == [(last, "length")] * 2
