"""Batches on real worker processes: all rows come out, and their end is told, though the io worker is killed."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from sqlalchemy import func, select, text, update
from standardwebhooks import Webhook

from app import batches, files, signatures, tables
from app.grammars import Grammars
from app.prompts import Prompts
from app.rows import Desk
from app.shelf import Shelf
from app.vault import Vault
from worker.batches import Clerk, advance_batches, remove_strays

NUM_ROWS = 700
"""More than the two windows that are read before jobs end."""


@pytest.fixture
def receiver() -> Iterator[tuple[str, queue.Queue[tuple[dict[str, str], bytes]]]]:
    """A local receiver of webhooks: its URL and what it got."""
    got: queue.Queue[tuple[dict[str, str], bytes]] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.put((dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", got
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.fixture
def shelf(site: Any) -> Shelf:
    return Shelf(site.settings)


@pytest.fixture
def desk(site: Any) -> Desk:
    return Desk(site.settings, site.model, Prompts(site.model), Grammars(site.model))


def create(site: Any, shelf: Shelf, lines: list[bytes], **fields: Any) -> str:
    settings = site.settings.model_copy(update={"webhook_allow_private": True})
    with site.db.transaction() as session, shelf.draft() as draft:
        draft.write(b"\n".join(lines))
        file = files.add(session, site.tenant_id, draft, filename="in.jsonl", purpose="batch")
        body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"} | fields
        return batches.create(session, site.tenant_id, batches.parse(body, settings), settings).id


def row(custom_id: str) -> bytes:
    body = {"prompt": "hi", "max_tokens": 4}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}).encode()


def batch(site: Any, batch_id: str) -> tables.Batch:
    with site.db.transaction() as session:
        found: tables.Batch = batches.find(session, site.tenant_id, batch_id)
        return found


def lines(shelf: Shelf, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in shelf.path(file_id).read_bytes().splitlines()]


def num_succeeded(site: Any, batch_id: str) -> int:
    with site.db.transaction() as session:
        query = select(func.count()).where(tables.Job.batch_id == batch_id, tables.Job.status == "succeeded")
        return int(session.scalar(query) or 0)


def test_a_batch_runs_to_its_end_though_the_io_worker_is_killed(site: Any, shelf: Shelf, receiver: Any) -> None:
    url, got = receiver
    secret = signatures.new_secret()
    with site.db.transaction() as session:
        sealed = Vault.open(site.settings).encrypt(secret)
        session.execute(update(tables.Tenant).where(tables.Tenant.id == site.tenant_id).values(webhook_secret=sealed))
    content = [row(f"row-{position}") for position in range(NUM_ROWS)]
    content[100] = b"{"
    batch_id = create(site, shelf, content, webhook={"url": url})

    processes = [site.spawn_worker(), site.start_io(webhook_allow_private=True)]
    site.wait_for(lambda: num_succeeded(site, batch_id) > 0)
    processes[1].kill()
    processes.append(site.start_io(webhook_allow_private=True))
    site.wait_for(lambda: batch(site, batch_id).status == "completed")

    ended = batch(site, batch_id)
    output, errors = lines(shelf, ended.output_file_id), lines(shelf, ended.error_file_id)
    assert [line["custom_id"] for line in output] == [f"row-{i}" for i in range(NUM_ROWS) if i != 100]
    assert len(errors) == 1
    headers, body = got.get(timeout=20)
    for process in processes:
        process.kill()
        process.wait(10)
    told = Webhook(secret).verify(body, headers)
    assert told["type"] == "batch.completed"
    assert told["data"]["request_counts"] == {"total": NUM_ROWS, "completed": NUM_ROWS - 1, "failed": 1}


class BrokenShelf(Shelf):
    """One whose bytes of a certain file cannot be read."""

    broken: str

    def open(self, file_id: str) -> Any:
        if file_id == self.broken:
            raise PermissionError(file_id)
        return super().open(file_id)


def test_a_batch_that_cannot_be_advanced_holds_up_itself_alone(
    site: Any, desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = BrokenShelf(site.settings)
    first, second = create(site, shelf, [row("a")]), create(site, shelf, [row("a")])
    shelf.broken = batch(site, first).input_file_id
    nudges: list[None] = []
    advance_batches(Clerk(site.db, desk, shelf), site.redis, nudge=lambda: nudges.append(None))
    assert batch(site, first).status == "validating"
    assert batch(site, second).status == "in_progress"
    assert nudges
    assert first in caplog.text


def test_a_step_that_the_database_refuses_holds_up_its_batch_alone(
    site: Any, shelf: Shelf, desk: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = create(site, shelf, [row("a")]), create(site, shelf, [row("a")])

    set_status = batches.set_status

    def refuse(session: Any, batch: Any, status: Any) -> None:
        if batch.id == first:
            session.execute(text("select 1 / 0"))
        set_status(session, batch, status)

    monkeypatch.setattr("app.batches.set_status", refuse)
    advance_batches(Clerk(site.db, desk, shelf), site.redis, nudge=lambda: None)
    assert (batch(site, first).status, batch(site, second).status) == ("validating", "in_progress")
    assert first in caplog.text and second not in caplog.text


def test_what_was_advanced_is_announced_after_the_commit(site: Any, shelf: Shelf, desk: Desk) -> None:
    batch_id = create(site, shelf, [row("a"), row("a")])  # the second one is refused
    pubsub = site.redis.pubsub(ignore_subscribe_messages=True)
    pubsub.psubscribe("everbatch:events:*")
    pubsub.get_message(timeout=5)
    advance_batches(Clerk(site.db, desk, shelf), site.redis, nudge=lambda: None)
    with site.db.transaction() as session:
        ids = set(
            session.scalars(select(tables.Job.id).where(tables.Job.batch_id == batch_id, tables.Job.status == "failed"))
        )
    assert len(ids) == 1
    announced = set()
    site.wait_for(
        lambda: (
            (message := pubsub.get_message(timeout=1)) is None
            or announced.add(message["channel"].decode().rpartition(":")[2])
            or ids <= announced
        )
    )
    assert ids <= announced
    pubsub.close()


def test_strays_that_cannot_be_erased_end_no_worker(site: Any, shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    shelf.directory.mkdir(exist_ok=True)
    directory = shelf.directory / "no-file"
    directory.mkdir()
    os.utime(directory, (0, 0))
    remove_strays(site.db, shelf)
    assert "stray files cannot be erased" in caplog.text
    directory.rmdir()
