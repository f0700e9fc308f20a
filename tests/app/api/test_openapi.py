"""/openapi.json says what the routes do, and they do what it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from flask import Flask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.api.openapi import document
from app.api.operations import operation_of
from app.client import Client
from app.supervisor import Ready

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def test_every_route_is_described(app: Flask) -> None:
    bare = {rule.rule for rule in app.url_map.iter_rules() if operation_of(app.view_functions[rule.endpoint]) is None}
    assert bare == set()


def test_operations_and_schemas_have_names_of_their_own(app: Flask) -> None:
    shown = document(app)
    ids = [operation["operationId"] for path in shown["paths"].values() for operation in path.values()]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[A-Za-z0-9]+", name) for name in shown["components"]["schemas"])


def test_only_what_is_public_answers_without_a_key(app: Flask) -> None:
    client = app.test_client()
    for path, operations in document(app)["paths"].items():
        for method, operation in operations.items():
            answer = client.open(path, method=method)
            assert (answer.status_code == 401) == bool(operation["security"]), (method, path)


def test_the_docs_page_loads_from_here_alone(app: Flask) -> None:
    client = app.test_client()
    page = client.get("/docs")
    assert page.content_type.startswith("text/html")
    named = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert named and all(path.startswith("/docs/") for path in named)
    assert {client.get(path).status_code for path in named} == {200}
    assert client.get("/docs/other.js").status_code == 404
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]


@pytest.fixture
def known(service: Ready) -> dict[str, str]:
    """Ids of objects that are there, by the names that paths give them."""
    with Client(service.access.url, service.access.paid_key) as client:
        job_id = client.submit("x", max_tokens=1)["id"]
    return {"job_id": job_id, "response_id": job_id.replace("job_", "resp_")}


def fuzz(service: Ready, known: dict[str, str], *, mode: GenerationMode, max_examples: int) -> None:
    """Call each operation with what its schema allows, or does not allow; any answer must be one that it describes."""
    schema = schemathesis.openapi.from_url(f"{service.access.url}/openapi.json")
    for operation in _operations(schema):

        @settings(
            max_examples=max_examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode), st.booleans())
        def is_as_described(case: Any, is_known: bool) -> None:
            if is_known:
                names = known.keys() & (case.path_parameters or {}).keys()
                case.path_parameters = {**(case.path_parameters or {}), **{name: known[name] for name in names}}
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
                case.body = {**case.body, **_short(case.operation.path)}
            case.call_and_validate(headers={"Authorization": f"Bearer {service.access.paid_key}"}, checks=CHECKS)

        if mode is GenerationMode.POSITIVE or _can_be_wrong(operation):
            is_as_described()


def _short(path: str) -> dict[str, int]:
    """What keeps a job short that the request waits for."""
    match path:
        case "/v1/responses":
            return {"max_output_tokens": 2}
        case "/v1/jobs" | "/v1/completions" | "/v1/chat/completions":
            return {"max_tokens": 2}
    return {}


def _can_be_wrong(operation: Any) -> bool:
    """Whether there is anything that its schema forbids."""
    return bool(operation.body or operation.query or operation.headers)


def _operations(schema: Any) -> Iterator[Any]:
    for found in schema.get_all_operations():
        yield found.ok()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_answers_are_those_of_the_document(service: Ready, known: dict[str, str], mode: GenerationMode) -> None:
    fuzz(service, known, mode=mode, max_examples=3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_many_answers_are_those_of_the_document(service: Ready, known: dict[str, str], mode: GenerationMode) -> None:
    fuzz(service, known, mode=mode, max_examples=100)
