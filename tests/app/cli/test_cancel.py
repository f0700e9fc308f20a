from __future__ import annotations

import json
from collections.abc import Callable

from click.testing import Result

from app.client import Client

Everbatch = Callable[..., Result]


def test_several_jobs_are_cancelled(everbatch: Everbatch, client: Client) -> None:
    jobs = [client.submit("x", max_tokens=8000)["id"] for _ in range(2)]
    cancelled = everbatch("cancel", *jobs)
    assert cancelled.exit_code == 0
    assert cancelled.stdout.splitlines() == [f"{job} cancelled" for job in jobs]
    assert [client.wait(job)["status"] for job in jobs] == ["cancelled"] * 2


def test_those_that_cannot_be_are_named_and_the_others_cancelled(everbatch: Everbatch, client: Client) -> None:
    ended = client.wait(client.submit("x", max_tokens=1)["id"])["id"]
    running = client.submit("x", max_tokens=8000)["id"]
    cancelled = everbatch("cancel", ended, "job_nope", running, "--json")
    assert cancelled.exit_code == 1
    assert [json.loads(line)["id"] for line in cancelled.stdout.splitlines()] == [running]
    has_ended, is_unknown = cancelled.stderr.splitlines()
    assert ended in has_ended
    assert is_unknown == "Error: There is no job 'job_nope'"
