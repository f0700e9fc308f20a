"""Celery's own tools, as an operator starts them, on a real engine worker: its commands, and Flower."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from celery.utils.nodenames import gethostname

from app.broker import GENERATE
from app.children import end, free_port
from app.commands import PROJECT
from tests.site import Site


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[str]:
    """The name that Celery has for an engine worker, in whose hands a job stays until it is cancelled."""
    process = site.start_worker(echo_step_ms=50.0)
    yield f"engine1@{gethostname()}"
    assert site.stop(process) == 0


def celery(site: Site, worker: str, group: str, *command: str) -> Any:
    """What the worker answers to a command: `celery --broker … inspect --json --destination … active`."""
    assert site.settings.redis_url
    start = [sys.executable, "-m", "celery", "--broker", site.settings.redis_url]
    ran = subprocess.run(
        [*start, group, "--json", "--timeout", "30", "--destination", worker, *command],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    answers = json.loads(ran.stdout)  # of inspect by worker, of control a list of these
    return (answers[0] if isinstance(answers, list) else answers)[worker]


def message_of(site: Site, job_id: str) -> str:
    """The id of the message by which a running job was claimed."""
    return f"{job_id}:{site.job(job_id).claimed_number}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_inspect_shows_what_runs_and_the_engine_and_terminate_ends_it(site: Site, worker: str) -> None:
    job_ids = site.run(3, max_tokens=8000)
    site.wait_until(job_ids, "running")
    active = {task["id"]: task for task in celery(site, worker, "inspect", "active")}
    assert active.keys() == {message_of(site, job_id) for job_id in job_ids}
    assert {task["name"] for task in active.values()} == {GENERATE}
    assert all(task["time_start"] is not None for task in active.values())
    assert celery(site, worker, "inspect", "query_task", *active).keys() == active.keys()
    stats = celery(site, worker, "inspect", "stats")
    assert stats["pool"]["tiers"]["paid"] == {"running": 3, "waiting": 0}
    assert stats["total"][GENERATE] >= 3

    first, second, third = job_ids
    celery(site, worker, "control", "terminate", "TERM", message_of(site, first))
    site.wait_until([first], "cancelled")
    celery(site, worker, "control", "revoke", message_of(site, second))
    assert message_of(site, second) in celery(site, worker, "inspect", "revoked")
    assert site.statuses([second, third]) == {"running": 2}, "who runs is not stopped by a plain revoke"
    for job_id in (second, third):
        site.cancel(job_id)
    site.wait_for(lambda: celery(site, worker, "inspect", "active") == [])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_flower_sees_the_worker_and_its_tasks(site: Site, worker: str) -> None:
    assert site.settings.redis_url
    port = free_port()
    command = [sys.executable, "-m", "celery", "--broker", site.settings.redis_url, "flower", f"--port={port}"]
    with (site.settings.home / "flower.log").open("wb") as log:
        flower = subprocess.Popen(
            [*command, "--address=127.0.0.1"],
            env=os.environ | {"FLOWER_UNAUTHENTICATED_API": "true"},
            cwd=site.settings.home,
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as client:

            def ask(path: str) -> Any:
                try:
                    answer = client.get(path)
                except httpx.TransportError:
                    return {}
                return answer.json() if answer.status_code == 200 else {}

            site.wait_for(lambda: worker in ask("/api/workers?refresh=true"))
            assert ask("/api/workers")[worker]["stats"]["pool"]["slots"] == site.settings.max_num_seqs
            # It asks workers for their events after a while. What began before that it does not see.
            site.wait_for(lambda: site.run(max_tokens=1) and ask("/api/tasks?state=SUCCESS"), timeout_s=60)
            (running,) = site.run(max_tokens=8000)
            site.wait_until([running], "running")
            site.wait_for(lambda: message_of(site, running) in ask("/api/tasks?state=STARTED"))
            (ended,) = site.run()
            site.wait_until([ended], "succeeded")
            site.wait_for(lambda: message_of(site, ended) in ask("/api/tasks?state=SUCCESS"))
            task = ask(f"/api/task/info/{message_of(site, ended)}")
            assert (task["name"], task["worker"]) == (GENERATE, worker)
            revoked = client.post(f"/api/task/revoke/{message_of(site, running)}?terminate=true")
            assert revoked.status_code == 200
            site.wait_until([running], "cancelled")
            assert "Once upon a time" not in json.dumps(ask("/api/tasks")), "no prompt is shown there"
    finally:
        end(flower, by=signal.SIGTERM, timeout_s=10)


@pytest.mark.parametrize("package", ["app", "worker"])
def test_nobody_has_the_broker_wait_for_a_time(package: str) -> None:
    """Redis gives such messages out again and again once they wait for longer than its visibility timeout."""
    found = [
        f"{path.relative_to(PROJECT)}:{token.start[0]}: {token.line.strip()}"
        for path in sorted((PROJECT / package).rglob("*.py"))
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.string.strip("'\"") in {"eta", "countdown", "autoretry_for", "self.retry"}
    ]
    assert found == []
