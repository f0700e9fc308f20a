"""Processes that die at named points under a small load: what was promised holds, and nobody's hands are needed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from sqlalchemy import text

from app import tenants
from app.children import end
from app.cli.demo.receiver import Receiver, receiver
from app.client import Client, Refused, Unreachable
from app.tiers import Plan
from app.vault import Vault
from tests.fault import promises
from tests.fault.crashes import rounds
from tests.fault.crashing import Spoiled
from tests.fault.load import Load
from tests.fault.service import Member, Service
from tests.site import unfinished

T = TypeVar("T")
HEAL_S = 60.0
"""A promise: every single fault heals within so long, without hands."""
ROWS = 40
"""Of each batch."""


@dataclass
class Stage:
    service: Service
    inbox: Receiver
    batches: Client
    """Of a tenant whose batches nobody else counts."""
    key: str

    def wait(self, holds: Callable[[], bool], why: str) -> None:
        """Keep the service alive until the condition holds."""
        deadline = time.monotonic() + HEAL_S
        while not holds():
            logs = self.service.settings.home.glob("*.log")
            said = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)
            assert time.monotonic() < deadline, f"{why}\n{said}"
            self.service.tick()


@pytest.fixture(scope="module")
def stage(make_home: Callable[[], Path]) -> Iterator[Stage]:
    service = Service.start(make_home())
    try:
        with service.database.transaction() as session:
            made = tenants.provision(session, Vault.open(service.settings), name="batches", plan=Plan.PAID)
        with receiver() as inbox, Client(service.url, made.key) as client:
            yield Stage(service, inbox, client, made.key)
    finally:
        service.close()


@pytest.fixture(scope="module")
def load(stage: Stage) -> Load:
    """One for all rounds: it remembers what was answered in earlier ones."""
    return Load(stage.service, stage.inbox, seed=0)


def insist(ask: Callable[[], T]) -> T:
    """Ask until there is an answer, as long as healing may take."""
    deadline = time.monotonic() + HEAL_S
    while True:
        try:
            return ask()
        except (Unreachable, httpx.TransportError, Refused) as error:
            if (isinstance(error, Refused) and error.status < 500) or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def run_batch(stage: Stage, directory: Path) -> None:
    """A file of rows in, a file of as many answers out, each once; then the file is removed."""
    source, answers = directory / "rows.jsonl", directory / "answers.jsonl"
    source.write_text("".join(f"{json.dumps(row_of(number))}\n" for number in range(ROWS)))
    client = stage.batches
    uploaded = insist(lambda: client.upload(source))
    batch_id = insist(lambda: client.create_batch(uploaded["id"], endpoint="/v1/completions"))["id"]
    while (batch := insist(lambda: client.batch(batch_id)))["status"] not in ("completed", "failed", "expired"):
        time.sleep(0.1)
    assert batch["request_counts"] == {"total": ROWS, "completed": ROWS, "failed": 0}, batch
    assert batch["output_file_id"] and not batch["error_file_id"]
    insist(lambda: client.download(str(batch["output_file_id"]), answers))
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["custom_id"] for line in found] == [f"row-{number}" for number in range(ROWS)]
    place = f"{stage.service.url}/v1/files/{uploaded['id']}"
    gone = insist(lambda: httpx.delete(place, headers={"Authorization": f"Bearer {stage.key}"}, trust_env=False))
    assert gone.status_code in (200, 404, 409), gone.text  # 409: a twin of the batch, whose answer was lost, reads it


def row_of(number: int) -> dict[str, object]:
    body = {"prompt": "Once upon a time", "max_tokens": 5, "seed": number, "model": "echo"}
    return {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def arm(member: Member, spoiled: Spoiled, mark: Path) -> None:
    """Start it again such that it dies once; all its later lives are plain."""
    assert member.process is not None
    end(member.process, by=signal.SIGTERM, timeout_s=10)
    plain, member.command = member.command, spoiled.command(member.command, mark)
    member.start()
    member.command = plain


def let_leases_run_out(service: Service) -> None:
    """Deliveries that somebody may have died with are due, as they would be after a minute."""
    with service.database.transaction() as session:
        session.execute(text("update deliveries set next_at = clock_timestamp() where status = 'sending'"))


def named(points: dict[str, tuple[str, Spoiled]]) -> str:
    return " + ".join(name for name, _ in points.values())


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("points", rounds(), ids=named)
def test_a_process_that_dies_between_two_writes_breaks_no_promise(
    stage: Stage, load: Load, points: dict[str, tuple[str, Spoiled]], tmp_path: Path
) -> None:
    service = stage.service
    marks = {name: tmp_path / member for member, (name, _) in points.items()}
    for member in points:
        service.members[member].send(signal.SIGTERM)
    for member, (name, spoiled) in points.items():
        arm(service.members[member], spoiled, marks[name])
    stage.wait(service.is_ready, "the API is not there")
    with ThreadPoolExecutor(1) as pool:
        load.seed += 1
        load.start()
        try:
            batch: Future[None] = pool.submit(run_batch, stage, tmp_path)
            stage.wait(
                lambda: all(mark.exists() for mark in marks.values()),
                f"not reached: {[name for name, mark in marks.items() if not mark.exists()]}",
            )
            let_leases_run_out(service)
            began = time.monotonic()
            has_run = load.probe()
            stage.wait(has_run.is_set, "a new job does not run")
            stage.wait(batch.done, "the batch does not end")
            assert time.monotonic() - began < HEAL_S
            batch.result()
        finally:
            stopping = pool.submit(load.stop)
            stage.wait(stopping.done, "clients still wait for answers")
    with service.database.transaction() as session:
        session.execute(text("set local idle_in_transaction_session_timeout = 0"))
        stage.wait(lambda: unfinished(session) == 0, "jobs, deliveries or settlements never end")
        assert promises.broken(session, load) == []
