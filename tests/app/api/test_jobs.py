"""/v1/jobs: what clients send, and what they are told."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from werkzeug.test import TestResponse

from app.api.services import services_of
from app.db import Database
from app.events import Delta, append_tokens
from app.logprobs import TokenLogprob, pack
from app.reception import Reception
from app.settings import Settings
from app.tables import Delivery, Job
from app.tiers import Plan, Tier

FIELDS = [
    "id", "object", "status", "tier", "model", "attempt", "created_at", "started_at", "finished_at", "output", "usage",
    "error", "metadata",
]  # fmt: skip


def refusal(answer: TestResponse) -> tuple[int, str, str | None]:
    error = answer.get_json()["error"]
    return answer.status_code, error["code"], error["param"]


# ---- submit


def test_submit_answers_202_with_the_job_and_where_it_is(call: Any) -> None:
    answer = call.submit(metadata={"order": "17"})
    job = answer.get_json()
    assert answer.status_code == 202
    assert answer.headers["Location"] == f"/v1/jobs/{job['id']}"
    assert list(job) == FIELDS
    assert job == {
        "id": job["id"],
        "object": "job",
        "status": "queued",
        "tier": "paid",
        "model": "echo",
        "attempt": 0,
        "created_at": job["created_at"],
        "started_at": None,
        "finished_at": None,
        "output": {"choices": [{"index": 0, "text": "", "finish_reason": None}]},
        "usage": {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5},
        "error": None,
        "metadata": {"order": "17"},
    }
    assert datetime.fromisoformat(job["created_at"]).utcoffset() == timedelta(0)
    read = call("GET", f"/v1/jobs/{job['id']}").get_json()
    assert set(read.pop("queue")) == {"position", "estimated_start_at", "reason"}
    assert read == job


@pytest.mark.parametrize(
    ("plan", "service_tier", "tier"),
    [
        (Plan.PAID, None, "paid"),
        (Plan.PAID, "default", "paid"),
        (Plan.PAID, "flex", "bulk"),
        (Plan.FREE, None, "free"),
        (Plan.FREE, "auto", "free"),
        (Plan.FREE, "flex", "bulk"),
    ],
)
def test_the_plan_and_the_service_tier_make_the_tier(
    call_as: Any, new_tenant: Any, plan: Plan, service_tier: str | None, tier: str
) -> None:
    assert call_as(new_tenant(plan)).submit(service_tier=service_tier).get_json()["tier"] == tier


def test_a_seed_is_drawn_and_max_tokens_have_a_default(call: Any, db: Database) -> None:
    job_ids = [call.submit().get_json()["id"] for _ in range(2)]
    with db.transaction() as session:
        first, second = session.scalars(select(Job.sampling).where(Job.id.in_(job_ids)))
    assert first["seed"] != second["seed"]
    assert first | {"seed": 0} == {"max_tokens": 256, "seed": 0}, "the engine has the other defaults"


def test_max_tokens_defaults_to_what_fits(call: Any, db: Database) -> None:
    job_id = call.submit(prompt="x" * 8100).get_json()["id"]
    with db.transaction() as session:
        assert session.scalar(select(Job.sampling["max_tokens"].as_integer()).where(Job.id == job_id)) == 8192 - 8100


def test_the_deadline_counts_from_the_submission(call: Any, db: Database, settings: Settings) -> None:
    own, default = (call.submit(**body).get_json()["id"] for body in ({"deadline": 90}, {}))
    with db.transaction() as session:
        spans = {row[0]: row[1] for row in session.execute(select(Job.id, Job.deadline_at - Job.created_at))}
    assert spans[own] == timedelta(seconds=90)
    assert spans[default] == timedelta(seconds=settings.tiers[Tier.PAID].deadline_s)


def test_a_full_queue_answers_429_and_when_to_come_back(call: Any, call_as: Any, new_tenant: Any, app: Any) -> None:
    services = services_of(app).get()
    reception = services.reception
    tight = services.settings.tiers.paid.model_copy(update={"max_queued_jobs": 2})
    tiers = services.settings.tiers.model_copy(update={"paid": tight})
    object.__setattr__(services, "reception", Reception(services.database, tiers))
    try:
        assert [call.submit().status_code for _ in range(3)] == [202, 202, 429]
        answer = call.submit()
        assert refusal(answer) == (429, "queue_full", None)
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert call.submit(service_tier="flex").status_code == 202  # each tier has a line of its own
        assert call_as(new_tenant()).submit().status_code == 202  # another tenant's queue is his own
    finally:
        object.__setattr__(services, "reception", reception)


# ---- idempotency


def test_the_same_key_and_body_make_one_job(call: Any) -> None:
    first = call.submit(headers={"Idempotency-Key": '"a b"'}, metadata={"x": "1", "y": "2"})
    again = call.submit(headers={"Idempotency-Key": "a b"}, metadata={"y": "2", "x": "1"})  # unquoted, in another order
    assert (first.status_code, again.status_code) == (202, 202)
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.get_json() == first.get_json()
    assert again.headers["Location"] == first.headers["Location"]


def test_a_replay_shows_the_job_as_it_is_now(call: Any, worker: Any) -> None:
    headers = {"Idempotency-Key": "k"}
    worker.run(call.submit(headers=headers).get_json()["id"], "done")
    assert call.submit(headers=headers).get_json()["output"]["choices"][0]["text"] == "done"


def test_the_same_key_with_another_body_is_refused(call: Any) -> None:
    call.submit(headers={"Idempotency-Key": "k"})
    answer = call.submit(headers={"Idempotency-Key": "k"}, seed=1)
    assert refusal(answer) == (422, "idempotency_key_reused", "Idempotency-Key")


def test_keys_of_two_tenants_have_nothing_to_do_with_each_other(call: Any, call_as: Any, new_tenant: Any) -> None:
    headers = {"Idempotency-Key": "k"}
    other = call_as(new_tenant()).submit(headers=headers, seed=1)
    assert other.status_code == 202
    assert other.get_json()["id"] != call.submit(headers=headers).get_json()["id"]


def test_a_key_whose_job_was_deleted_makes_no_second_one(call: Any) -> None:
    headers = {"Idempotency-Key": "k"}
    call("DELETE", f"/v1/jobs/{call.submit(headers=headers).get_json()['id']}")
    answer = call.submit(headers=headers)
    assert refusal(answer) == (409, "conflict", "Idempotency-Key")


@pytest.mark.parametrize("key", ["", '""', "a" * 256, '"' + "a" * 256 + '"', '"unclosed', "tab\tbed", "ä"])
def test_an_unusable_key_is_refused(call: Any, key: str) -> None:
    assert refusal(call.submit(headers={"Idempotency-Key": key})) == (422, "invalid_request", "Idempotency-Key")


# ---- read and list


def test_a_running_job_shows_what_there_is_so_far(call: Any, worker: Any) -> None:
    job_id = call.submit().get_json()["id"]
    claim = worker.take(job_id)
    worker.write(claim, "abc", 3)
    job = call("GET", f"/v1/jobs/{job_id}").get_json()
    assert (job["status"], job["attempt"]) == ("running", 1)
    assert job["output"]["choices"] == [{"index": 0, "text": "abc", "finish_reason": None}]
    assert job["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert call("GET", "/v1/jobs").get_json()["data"] == [job]


def test_a_finished_job_shows_its_result(call: Any, worker: Any) -> None:
    job_id = call.submit().get_json()["id"]
    worker.run(job_id, "Grüße ", "\0\u2028")
    job = call("GET", f"/v1/jobs/{job_id}").get_json()
    assert job["status"] == "succeeded"
    assert job["output"]["choices"] == [{"index": 0, "text": "Grüße \0\u2028", "finish_reason": "stop"}]
    assert job["created_at"] < job["started_at"] <= job["finished_at"]


def test_choices_and_their_logprobs_are_shown_of_a_job_that_is_read_alone(
    call: Any, db: Database, worker: Any, limit: Any
) -> None:
    limit(tokens_per_day=5 + 2 * 9)
    asked = {"prompt": "hello", "n": 2, "max_tokens": 9, "logprobs": True}
    too_many = call("POST", "/v1/jobs", json=asked | {"n": 3})
    assert (too_many.status_code, too_many.get_json()["error"]["code"]) == (429, "quota_exceeded")
    submitted = call("POST", "/v1/jobs", json=asked, headers={"Idempotency-Key": "a"}).get_json()
    nothing = [{"index": index, "text": "", "finish_reason": None} for index in (0, 1)]
    assert submitted["output"]["choices"] == nothing
    claim = worker.take(submitted["id"])
    with db.transaction() as session:
        likely = pack([TokenLogprob(b"a", -0.5)])
        append_tokens(session, worker.id, [Delta(claim.job_id, 1, 3, "a", (97,), 1, "length", likely)])
    job = call("GET", f"/v1/jobs/{claim.job_id}").get_json()
    content = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]
    shown = [nothing[0], {"index": 1, "text": "a", "finish_reason": "length"}]
    whole = [shown[0] | {"logprobs": {"content": []}}, shown[1] | {"logprobs": {"content": content}}]
    assert job["output"]["choices"] == whole
    assert job["usage"] == {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
    (listed,) = call("GET", "/v1/jobs").get_json()["data"]
    assert listed["output"]["choices"] == shown
    again = call("POST", "/v1/jobs", json=asked, headers={"Idempotency-Key": "a"}).get_json()
    assert again["output"]["choices"] == whole
    cancelled = call("POST", f"/v1/jobs/{claim.job_id}/cancel").get_json()
    assert (cancelled["status"], cancelled["output"]["choices"]) == ("cancelled", whole)


def test_the_list_is_walked_with_a_cursor(call: Any) -> None:
    job_ids = [call.submit().get_json()["id"] for _ in range(5)][::-1]
    seen: list[str] = []
    query = "?limit=2"
    for has_more in (True, True, False):
        page = call("GET", f"/v1/jobs{query}").get_json()
        assert page["object"] == "list"
        assert page["has_more"] is has_more
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        seen += [job["id"] for job in page["data"]]
        query = f"?limit=2&after={page['last_id']}"
    assert seen == job_ids


def test_an_empty_list_has_no_ids(call: Any) -> None:
    empty = {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}
    assert call("GET", "/v1/jobs").get_json() == empty


def test_the_list_can_be_cut_down_to_a_status(call: Any) -> None:
    kept, cancelled = (call.submit().get_json()["id"] for _ in range(2))
    call("POST", f"/v1/jobs/{cancelled}/cancel")
    for status, job_id in (("queued", kept), ("cancelled", cancelled)):
        assert [job["id"] for job in call("GET", f"/v1/jobs?status={status}").get_json()["data"]] == [job_id]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        *[(f"limit={value}", "limit") for value in ("0", "101", "-1", "x", "", "1.5", "٣", "1" * 5000)],
        *[(f"after={value}", "after") for value in ("", "x", "%00", "job_", "job_" + "0" * 31, "1" * 5000)],
        *[(f"status={value}", "status") for value in ("", "done", "%00", "QUEUED")],
    ],
)
def test_a_wrong_query_is_refused_by_name(call: Any, query: str, field: str) -> None:
    assert refusal(call("GET", f"/v1/jobs?{query}")) == (422, "invalid_request", field)


# ---- cancel and delete


def test_cancel_ends_a_job_and_keeps_its_text(call: Any, worker: Any) -> None:
    job_id = call.submit().get_json()["id"]
    claim = worker.take(job_id)
    worker.write(claim, "so far", 3)
    answer = call("POST", f"/v1/jobs/{job_id}/cancel", headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    assert answer.get_json()["status"] == "cancelled"
    assert answer.get_json()["output"]["choices"][0]["text"] == "so far"
    assert worker.write(claim, " and further", 4) == []
    assert call("POST", f"/v1/jobs/{job_id}/cancel").get_json() == answer.get_json()  # a second cancel changes nothing


def test_cancelling_a_finished_job_is_a_409_that_nobody_should_retry(call: Any, worker: Any) -> None:
    job_id = call.submit().get_json()["id"]
    worker.run(job_id)
    answer = call("POST", f"/v1/jobs/{job_id}/cancel")
    assert refusal(answer) == (409, "conflict", None)
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("state", ["queued", "running", "succeeded"])
def test_a_deleted_job_is_gone(call: Any, worker: Any, state: str) -> None:
    job_id = call.submit().get_json()["id"]
    if state == "running":
        worker.take(job_id)
    if state == "succeeded":
        worker.run(job_id, "text")
    answer = call("DELETE", f"/v1/jobs/{job_id}", headers={"Content-Type": "application/json"})
    assert answer.get_json() == {"id": job_id, "object": "job", "deleted": True}
    assert call("GET", f"/v1/jobs/{job_id}").status_code == 404
    assert call("DELETE", f"/v1/jobs/{job_id}").status_code == 404
    assert call("GET", "/v1/jobs").get_json()["data"] == []


def test_a_webhook_is_kept_with_the_job_that_ends(call: Any, db: Database) -> None:
    job_id = call.submit(webhook={"url": "https://example.com/hook"}).get_json()["id"]
    call("POST", f"/v1/jobs/{job_id}/cancel")
    with db.transaction() as session:
        (delivery,) = session.scalars(select(Delivery).where(Delivery.job_id == job_id))
        assert (delivery.url, delivery.status) == ("https://example.com/hook", "pending")


# ---- whose it is

ROUTES = [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/events")]


@pytest.mark.parametrize(("method", "suffix"), ROUTES)
@pytest.mark.parametrize("state", ["queued", "running", "succeeded"])
def test_somebody_elses_job_looks_like_none(
    call: Any, call_as: Any, new_tenant: Any, worker: Any, method: str, suffix: str, state: str
) -> None:
    stranger: Callable[..., TestResponse] = call_as(new_tenant())
    job_id = call.submit().get_json()["id"]
    if state == "running":
        worker.take(job_id)
    if state == "succeeded":
        worker.run(job_id, "secret")
    unknown_id = "job_" + "0" * 32
    foreign = stranger(method, f"/v1/jobs/{job_id}{suffix}")
    unknown = stranger(method, f"/v1/jobs/{unknown_id}{suffix}")
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.get_data(as_text=True).replace(job_id, unknown_id) == unknown.get_data(as_text=True)
    assert call("GET", f"/v1/jobs/{job_id}").get_json()["status"] == state


def test_somebody_elses_cursor_shows_only_ones_own_jobs(call: Any, call_as: Any, new_tenant: Any) -> None:
    stranger = call_as(new_tenant())
    mine = stranger.submit().get_json()["id"]
    theirs = call.submit().get_json()["id"]
    assert [job["id"] for job in stranger("GET", f"/v1/jobs?after={theirs}").get_json()["data"]] == [mine]


@pytest.mark.parametrize("job_id", ["x", "job_", "%00", "job_%00", "..%2f", "j" * 16_000, "job_" + "G" * 32, "job_ü"])
@pytest.mark.parametrize(("method", "suffix"), ROUTES)
def test_an_impossible_id_is_a_404(call: Any, method: str, suffix: str, job_id: str) -> None:
    answer = call(method, f"/v1/jobs/{job_id}{suffix}")
    assert answer.status_code == 404
    assert answer.content_type == "application/problem+json"
