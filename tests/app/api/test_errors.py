"""Every error is one JSON document that both RFC 9457 and the stock OpenAI client understand."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from flask import Flask
from sqlalchemy import make_url, select, text
from sqlalchemy.exc import OperationalError
from werkzeug.test import TestResponse

from app.api import create_app
from app.api.services import services_of
from app.children import free_port, wait_until
from app.db import Database
from app.errors import SetupError
from app.settings import Settings
from app.tables import Job


def test_an_error_document_has_both_shapes(call: Any) -> None:
    answer = call("GET", "/v1/jobs/nothing")
    assert answer.content_type == "application/problem+json"
    assert answer.get_json() == {
        "type": "urn:everbatch:error:not_found",
        "title": "Not Found",
        "status": 404,
        "detail": "There is no job 'nothing'",
        "instance": "/v1/jobs/nothing",
        "error": {
            "message": "There is no job 'nothing'",
            "type": "invalid_request_error",
            "param": "id",
            "code": "not_found",
        },
    }


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/nope", 404),
        ("GET", "//v1/jobs", 404),
        ("GET", "/v1/jobs/a/b/c", 404),
        ("GET", "/static/app.js", 404),
        ("PUT", "/v1/jobs", 405),
        ("PATCH", "/v1/jobs/job_x", 405),
        ("GET", "/v1/jobs/job_x/cancel", 405),
        ("OPTIONS", "/v1/jobs", 405),
        ("TRACE", "/v1/jobs", 405),
        ("POST", "/healthz", 405),
        ("POST", "/v1/jobs/job_x/events", 405),
    ],
)
def test_a_route_that_is_not_there_is_told_in_json(call: Any, method: str, path: str, status: int) -> None:
    answer = call(method, path)
    assert answer.status_code == status
    assert answer.content_type == "application/problem+json"
    assert answer.get_json()["status"] == status
    assert ("Allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/v1/jobs", "/v1/jobs/x", "/nope"])
def test_every_answer_has_an_id_of_its_own(call: Any, path: str) -> None:
    ids = {call("GET", path).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(request_id.startswith("req_") for request_id in ids)


@pytest.fixture
def broken(settings: Settings) -> Any:
    """An application with routes that fail in ways that ours should not."""
    app = create_app(settings)

    @app.get("/secret")
    def fail() -> str:
        raise KeyError("SECRET")

    @app.get("/database")
    def lose_the_database() -> str:
        raise OperationalError("select SECRET", {}, Exception("SECRET"))

    yield app
    services_of(app).close()


def test_an_unexpected_error_is_a_500_that_says_nothing_of_the_request(
    broken: Flask, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        answer = broken.test_client().get("/secret")
    assert answer.status_code == 500
    assert answer.content_type == "application/problem+json"
    assert answer.get_json()["error"]["type"] == "server_error"
    assert "SECRET" not in answer.text
    assert answer.headers["x-request-id"] in caplog.text


def test_without_the_database_a_503_says_when_to_come_back(broken: Flask, caplog: pytest.LogCaptureFixture) -> None:
    answer = broken.test_client().get("/database")
    assert (answer.status_code, answer.get_json()["error"]["code"]) == (503, "unavailable")
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    assert "SECRET" not in answer.text + caplog.text


def test_a_database_that_is_not_there_is_a_503(settings: Settings, owner: Any) -> None:
    url = f"postgresql+psycopg://app@127.0.0.1:{free_port()}/app"
    app = create_app(settings.model_copy(update={"database_url": url}))
    try:
        answer = app.test_client().get("/v1/jobs", headers={"Authorization": f"Bearer {owner.key}"})
        assert (answer.status_code, answer.get_json()["error"]["code"]) == (503, "unavailable")
    finally:
        services_of(app).close()


@pytest.fixture
def cramped(settings: Settings, db: Database) -> Iterator[Flask]:
    """An application for which the database has two connections."""
    assert settings.database_url is not None
    with db.transaction() as session:
        session.execute(text("create role cramped login password 'cramped' connection limit 2"))
        session.execute(text("grant all on all tables in schema public to cramped"))
        session.execute(text("grant all on all sequences in schema public to cramped"))
    url = make_url(settings.database_url).set(username="cramped", password="cramped")
    app = create_app(settings.model_copy(update={"database_url": url.render_as_string(hide_password=False)}))
    yield app
    services_of(app).close()
    with db.transaction() as session:
        session.execute(text("drop owned by cramped"))
        session.execute(text("drop role cramped"))


def test_more_requests_than_connections_are_answered_or_told_to_come_back(
    cramped: Flask, owner: Any, db: Database
) -> None:
    def submit(number: int) -> TestResponse:
        headers = {"Authorization": f"Bearer {owner.key}", "Idempotency-Key": str(number)}
        return cramped.test_client().post("/v1/jobs", headers=headers, json={"prompt": "hello"})

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(submit, range(200)))
    accepted = {answer.get_json()["id"] for answer in answers if answer.status_code == 202}
    refused = [answer for answer in answers if answer.status_code != 202]
    assert accepted and refused
    assert {(answer.status_code, answer.get_json()["error"]["code"]) for answer in refused} == {(503, "unavailable")}
    assert all(1 <= int(answer.headers["Retry-After"]) <= 60 for answer in refused)
    with db.transaction() as session:
        written = set(session.scalars(select(Job.id).where(Job.tenant_id == owner.tenant_id)))
        assert written == accepted, "a 503 of a submission leaves no job behind"
    assert wait_until(lambda: num_idle_in_transaction(db) == 0, 5), "a session keeps its transaction open"


def num_idle_in_transaction(db: Database) -> int:
    """Sessions of the cramped application that have begun a transaction and say nothing."""
    query = "select count(*) from pg_stat_activity where usename = 'cramped' and state like 'idle in transaction%'"
    with db.transaction() as session:
        return int(session.scalar(text(query)) or 0)


@pytest.mark.parametrize("missing", ["database_url", "redis_url"])
def test_a_missing_server_stops_the_start_by_name(settings: Settings, missing: str) -> None:
    with pytest.raises(SetupError, match=f"EVERBATCH_{missing.upper()}"):
        create_app(settings.model_copy(update={missing: None}))
