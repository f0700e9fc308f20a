"""Whether the process lives, whether it can take jobs, and what it counts."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask

from app.api import create_app
from app.api.services import services_of
from app.children import free_port
from app.settings import Settings


def test_a_process_that_answers_lives(app: Flask) -> None:
    assert app.test_client().get("/healthz").get_json() == {"status": "ok"}


def test_ready_counts_live_workers(app: Flask, new_worker: Any) -> None:
    client = app.test_client()
    before = client.get("/readyz").get_json()["workers"]
    new_worker().die()
    new_worker().stop_taking()
    new_worker()
    answer = client.get("/readyz")
    assert answer.status_code == 200
    assert answer.get_json() == {"status": "ready", "missing": [], "workers": before + 1}


@pytest.fixture
def alone(settings: Settings) -> Iterator[Flask]:
    """An application whose database and Redis are not there."""
    nowhere = {
        "database_url": f"postgresql+psycopg://app@127.0.0.1:{free_port()}/app",
        "redis_url": f"redis://127.0.0.1:{free_port()}/0",
    }
    app = create_app(settings.model_copy(update=nowhere))
    yield app
    services_of(app).close()


def test_ready_names_what_is_missing(alone: Flask) -> None:
    answer = alone.test_client().get("/readyz")
    assert answer.status_code == 503
    assert answer.get_json() == {"status": "unready", "missing": ["database", "redis"], "workers": None}
    assert "Retry-After" in answer.headers
    assert alone.test_client().get("/healthz").status_code == 200


def scrape(app: Flask) -> str:
    port = services_of(app).get().metrics_server.port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text: str = answer.read().decode()
    return text


def test_metrics_count_by_tier_and_code_and_never_by_tenant(app: Flask, call: Any, owner: Any) -> None:
    call.submit()
    call.submit(max_tokens=0)
    text = scrape(app)
    assert 'everbatch_jobs_submitted_total{tier="paid"}' in text
    assert 'everbatch_refusals_total{code="invalid_request"} 1.0' in text
    assert 'everbatch_http_request_seconds_count{method="POST",route="/v1/jobs"}' in text
    assert 'everbatch_jobs{status="queued",tier="paid"}' in text
    assert 'everbatch_jobs{status="running",tier="bulk"} 0.0' in text
    assert "everbatch_open_streams 0.0" in text
    assert 'everbatch_oldest_wait_seconds{tier="bulk"} 0.0' in text
    assert re.search(r'everbatch_oldest_wait_seconds\{tier="paid"\} 0*\.?0*[1-9]', text), "of the job above"
    assert 'everbatch_workers{state="unready"}' in text
    assert 'everbatch_deliveries{status="pending"}' in text
    assert owner.tenant_id not in text
    assert owner.key not in text


def test_made_up_methods_and_paths_make_no_metrics(app: Flask, call: Any) -> None:
    call("BREW", "/v1/jobs")
    call("GET", "/made/up")
    text = scrape(app)
    assert 'everbatch_http_request_seconds_count{method="any",route="unmatched"}' in text
    assert "BREW" not in text
    assert "made" not in text


def test_metrics_are_not_on_the_public_address(call: Any) -> None:
    assert call("GET", "/metrics").status_code == 404


def test_metrics_of_a_process_without_its_database_lack_the_jobs_alone(alone: Flask) -> None:
    alone.test_client().get("/healthz")
    text = scrape(alone)
    assert "everbatch_http_request_seconds" in text
    assert "everbatch_jobs{" not in text


def test_the_served_model_is_listed(call: Any) -> None:
    listed = call("GET", "/v1/models").get_json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model == {"id": "echo", "object": "model", "created": model["created"], "owned_by": "everbatch"}
    assert call("GET", "/v1/models/echo").get_json() == model
    assert call("GET", "/v1/models/gpt-5").status_code == 404
