from __future__ import annotations

import json
from collections.abc import Callable

from click.testing import Result

from app.client import Client

Everbatch = Callable[..., Result]


def test_ended_job_is_shown_from_its_first_token(everbatch: Everbatch, client: Client) -> None:
    job = client.wait(client.submit("x", max_tokens=30)["id"])
    watched = everbatch("watch", job["id"])
    assert (watched.exit_code, watched.stdout) == (0, job["output"]["choices"][0]["text"])
    assert json.loads(everbatch("watch", job["id"], "--json").stdout) == job


def test_exit_code_tells_how_the_job_ended(everbatch: Everbatch, client: Client) -> None:
    cancelled = client.submit("x", max_tokens=8000)["id"]
    client.cancel(cancelled)
    expired = client.submit("x", max_tokens=8000, deadline=0.2)["id"]
    assert everbatch("watch", cancelled).exit_code == 3
    watched = everbatch("watch", expired)
    assert watched.exit_code == 1
    assert "deadline" in watched.stderr


def test_unknown_job_is_named(everbatch: Everbatch) -> None:
    watched = everbatch("watch", "job_nope")
    assert (watched.exit_code, watched.stdout) == (2, "")
    assert "'job_nope'" in watched.stderr
