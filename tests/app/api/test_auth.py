"""Who gets in."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask

from app import tenants
from app.db import Database

ROUTES = [
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs"),
    ("GET", "/v1/jobs/job_x"),
    ("DELETE", "/v1/jobs/job_x"),
    ("POST", "/v1/jobs/job_x/cancel"),
    ("GET", "/v1/jobs/job_x/events"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/echo"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nothing_is_answered_without_a_key(app: Flask, method: str, path: str) -> None:
    answer = app.test_client().open(path, method=method)
    assert (answer.status_code, answer.get_json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")


PUBLIC = ("/healthz", "/readyz", "/openapi.json", "/docs", "/docs/name")


def test_every_route_but_the_public_ones_asks_for_a_key(app: Flask) -> None:
    client = app.test_client()
    for rule in app.url_map.iter_rules():
        path = rule.rule.replace("<", "").replace(">", "")
        for method in rule.methods or ():
            status = client.open(path, method=method).status_code
            assert (status != 401) == (path in PUBLIC), (method, path)


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Basic {key}", "{key}", "Bearer {key}x", "Bearer {key} x", "Bearer {prefix}", "Bearer \0",
     "Bearer ü", "Bearer " + "a" * 8000, "Bearer eb_000000000000_" + "a" * 43],
)  # fmt: skip
def test_a_wrong_key_is_refused(app: Flask, owner: Any, header: str) -> None:
    value = header.format(key=owner.key, prefix=owner.key[:15])
    answer = app.test_client().get("/v1/jobs", environ_overrides={"HTTP_AUTHORIZATION": value})
    assert answer.status_code == 401
    assert owner.key not in answer.text


@pytest.mark.parametrize("header", ["Bearer {key}", "bearer {key}", "BEARER   {key} "])
def test_a_right_key_opens(app: Flask, owner: Any, header: str) -> None:
    headers = {"Authorization": header.format(key=owner.key)}
    assert app.test_client().get("/v1/jobs", headers=headers).status_code == 200


def test_a_revoked_key_is_refused_at_once(call: Any, owner: Any, db: Database) -> None:
    assert call("GET", "/v1/jobs").status_code == 200
    with db.transaction() as session:
        tenants.revoke(session, owner.key[:15])
    assert call("GET", "/v1/jobs").status_code == 401
