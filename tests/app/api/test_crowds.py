"""Fifty clients of a tenant that ask at the very same moment, over HTTP."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from app.db import Database
from app.settings import Settings
from app.tables import IdempotencyRecord, Job, QuotaDay

CROWD = 50
PROMPT, MAX_TOKENS = "hello", 5
MOST = len(PROMPT) + MAX_TOKENS
"""Tokens that a job may use."""

Submission = tuple[str, Mapping[str, str], Mapping[str, Any]]
"""A key, more headers, and fields of the body."""


@pytest.fixture(scope="module")
def submit_all(serving: Any, settings: Settings) -> Iterator[Callable[[Sequence[Submission]], list[httpx.Response]]]:
    """Sends submissions at once, each from a client that is connected already; the answers in their order."""
    with serving(settings.model_copy(update={"api_threads": 2 * CROWD}), "--keep-alive", "60") as server:

        def send_all(submissions: Sequence[Submission]) -> list[httpx.Response]:
            barrier = threading.Barrier(len(submissions))

            def send(submission: Submission) -> httpx.Response:
                key, headers, fields = submission
                with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
                    assert client.get("/healthz").status_code == 200
                    barrier.wait(60)
                    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, **fields}
                    return client.post("/v1/jobs", headers={"Authorization": f"Bearer {key}", **headers}, json=body)

            with ThreadPoolExecutor(len(submissions)) as pool:
                return list(pool.map(send, submissions))

        yield send_all


def num_jobs(db: Database, owner: Any) -> int:
    with db.transaction() as session:
        return len(session.scalars(select(Job.id).where(Job.tenant_id == owner.tenant_id)).all())


def test_one_key_makes_one_job_and_everybody_gets_it(
    submit_all: Any, limit: Any, db: Database, owner: Any, new_tenant: Any
) -> None:
    limit(tokens_per_day=MOST)  # a second job would be refused
    other = new_tenant()
    answers = submit_all([(key, {"Idempotency-Key": "once"}, {}) for key in [owner.key] * CROWD + [other.key] * 5])
    assert {answer.status_code for answer in answers} == {202}
    ours, theirs = answers[:CROWD], answers[CROWD:]
    assert len({answer.json()["id"] for answer in ours}) == len({answer.json()["id"] for answer in theirs}) == 1
    assert ours[0].json()["id"] != theirs[0].json()["id"], "another tenant's key is another one"
    for own in (ours, theirs):
        assert sum("Idempotent-Replayed" not in answer.headers for answer in own) == 1
    assert num_jobs(db, owner) == num_jobs(db, other) == 1


def test_of_two_bodies_with_one_key_one_is_taken_and_the_other_refused(
    submit_all: Any, db: Database, owner: Any
) -> None:
    answers = submit_all([(owner.key, {"Idempotency-Key": "either"}, {"seed": n % 2}) for n in range(CROWD)])
    statuses = [{answer.status_code for answer in answers[side::2]} for side in (0, 1)]
    assert sorted(statuses, key=str) == [{202}, {422}]
    refused = [answer.json()["error"]["code"] for answer in answers if answer.status_code == 422]
    assert set(refused) == {"idempotency_key_reused"}
    assert len({answer.json()["id"] for answer in answers if answer.status_code == 202}) == 1
    assert num_jobs(db, owner) == 1


def test_the_very_first_requests_of_a_tenant_keep_its_quota(
    submit_all: Any, limit: Any, db: Database, owner: Any
) -> None:
    limit(tokens_per_day=7 * MOST + 3)
    answers = submit_all([(owner.key, {"Idempotency-Key": f"key-{n}"}, {}) for n in range(CROWD)])
    assert Counter(answer.status_code for answer in answers) == {202: 7, 429: CROWD - 7}
    for answer in answers:
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "quota_exceeded" and int(answer.headers["Retry-After"]) > 0
    with db.transaction() as session:
        (day,) = session.scalars(select(QuotaDay).where(QuotaDay.tenant_id == owner.tenant_id))
        assert (day.reserved, day.used) == (7 * MOST, 0)
        keys = session.scalars(select(IdempotencyRecord).where(IdempotencyRecord.tenant_id == owner.tenant_id))
        assert len(keys.all()) == 7, "a refused request leaves no trace, and may be sent again"


def test_the_very_first_requests_of_a_tenant_keep_its_rate(
    submit_all: Any, limit: Any, db: Database, owner: Any
) -> None:
    limit(requests_per_minute=7)
    answers = submit_all([(owner.key, {}, {}) for _ in range(CROWD)])
    assert Counter(answer.status_code for answer in answers) == {202: 7, 429: CROWD - 7}
    assert {int(answer.headers["Retry-After"]) > 0 for answer in answers if answer.status_code == 429} == {True}
    assert num_jobs(db, owner) == 7
