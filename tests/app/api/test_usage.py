"""GET /v1/usage."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import update

from app import dispatch
from app.db import Database
from app.tables import Job


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def row(tier: str, jobs: int, prompt_tokens: int, completion_tokens: int, day: str | None = None) -> dict[str, Any]:
    return {
        "day": day or today(),
        "model": "echo",
        "tier": tier,
        "jobs": jobs,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def test_usage_is_what_the_jobs_say_before_and_after_it_was_folded(call: Any, worker: Any, db: Database) -> None:
    assert call("GET", "/v1/usage").get_json()["data"] == []
    for tier, text in ((None, "abc"), (None, "d"), ("flex", "ef")):
        worker.run(call.submit(service_tier=tier).get_json()["id"], text)
    expected = [row("bulk", 1, 5, 2), row("paid", 2, 10, 4)]
    assert call("GET", "/v1/usage").get_json()["data"] == expected
    dispatch.settle(db)
    assert call("GET", "/v1/usage").get_json()["data"] == expected
    jobs = call("GET", "/v1/jobs").get_json()["data"]
    assert sum(each["total_tokens"] for each in expected) == sum(job["usage"]["total_tokens"] for job in jobs)


def test_a_range_of_days_includes_both_ends(call: Any, worker: Any, db: Database) -> None:
    for day in ("2026-01-30", "2026-01-31", "2026-02-01"):
        job_id = call.submit().get_json()["id"]
        with db.transaction() as session:
            moment = datetime.fromisoformat(f"{day}T23:00:00+00:00")
            session.execute(update(Job).where(Job.id == job_id).values(created_at=moment))
        worker.run(job_id, "a")
    answer = call("GET", "/v1/usage?start=2026-01-31&end=2026-02-01").get_json()
    assert (answer["start"], answer["end"]) == ("2026-01-31", "2026-02-01")
    assert answer["data"] == [row("paid", 1, 5, 1, "2026-01-31"), row("paid", 1, 5, 1, "2026-02-01")]


def test_csv_has_the_same_rows(call: Any, worker: Any) -> None:
    worker.run(call.submit().get_json()["id"], "abc")
    answer = call("GET", "/v1/usage?format=csv")
    assert answer.mimetype == "text/csv"
    (line,) = csv.DictReader(io.StringIO(answer.get_data(as_text=True)))
    assert line == {name: str(value) for name, value in row("paid", 1, 5, 3).items()}


def test_another_tenants_usage_is_not_shown(call: Any, call_as: Any, new_tenant: Any, worker: Any) -> None:
    worker.run(call.submit().get_json()["id"], "abc")
    assert call_as(new_tenant())("GET", "/v1/usage").get_json()["data"] == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("start=yesterday", "start"),
        ("start=2026-02-30", "start"),
        ("start=20260101", "start"),
        ("end=2026-1-1", "end"),
        ("start=2026-02-02&end=2026-02-01", "start"),
        ("start=2024-01-01&end=2026-02-01", "start"),
        ("end=0001-01-01", "end"),
        ("format=xml", "format"),
    ],
)
def test_a_wrong_query_names_its_field(call: Any, query: str, param: str) -> None:
    answer = call("GET", f"/v1/usage?{query}")
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (422, param)
