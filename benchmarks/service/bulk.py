"""Rows of a batch file to job rows, by the database's clock, and the part of it that is the database's.

`file_rows_per_s`: read, checked, tokenized and committed by the io worker. A window of rows is one transaction, and its
jobs have one time of creation: counted are the rows between the first window and the last one that was read without a
pause. `insert_rows_per_s`: such windows again, already tokenized. The engine worker stands still.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from app.cli.demo.service import Service
from app.client import Client
from app.tiers import Tier
from benchmarks.service.noop import put_in_line
from benchmarks.service.report import Bar, Quantity, over_rounds
from benchmarks.service.stack import ask, cpu_ms_per, cpu_s, echo_service, forget_jobs, wait_for
from worker.batches import MAX_UNFINISHED, WINDOW_ROWS

ENDPOINT = "/v1/chat/completions"
BARS = {"file_rows_per_s": Bar(at_least=20_000), "insert_rows_per_s": Bar(at_least=20_000)}


def measure(options: argparse.Namespace) -> Mapping[str, Quantity]:
    with (
        echo_service(slots=1, step_ms=60_000) as running,
        Client(running.access.url, running.access.paid_key) as client,
        tempfile.TemporaryDirectory() as directory,
    ):
        file = Path(directory) / "rows.jsonl"
        write_rows(file, MAX_UNFINISHED)
        _round(running, client, file)  # warm
        return over_rounds(options.rounds, lambda: _round(running, client, file), BARS)


def write_rows(file: Path, count: int, *, max_tokens: int = 16) -> None:
    """A batch file of short chats."""
    with file.open("w") as lines:
        for number in range(count):
            body = {
                "messages": [{"role": "user", "content": f"Sort the letters of the word number {number}."}],
                "max_tokens": max_tokens,
            }
            row = {"custom_id": f"row-{number}", "method": "POST", "url": ENDPOINT, "body": body}
            lines.write(json.dumps(row) + "\n")


def _round(running: Service, client: Client, file: Path) -> dict[str, float]:
    uploaded = client.upload(file)
    before = cpu_s(running)
    batch = client.create_batch(uploaded["id"], endpoint=ENDPOINT)
    wait_for(running, "(select count(*) from jobs where batch_id = :id) >= :rows", id=batch["id"], rows=MAX_UNFINISHED)
    costs = cpu_ms_per(running, before, MAX_UNFINISHED)
    windows = ask(
        running,
        """
        select sum(count) - min(count) filter (where first = created_at) as rows,
            extract(epoch from max(created_at) - min(created_at)) as seconds
        from (
            select created_at, count(*), min(created_at) over () as first
            from jobs where batch_id = :id group by created_at
        ) as windows
        """,
        id=batch["id"],
    )
    forget_jobs(running)
    return {
        "file_rows_per_s": float(windows.rows) / float(windows.seconds),
        **{f"file_{name}": value for name, value in costs.items()},
        **_insert(running),
    }


def _insert(running: Service) -> dict[str, float]:
    before, began = cpu_s(running), time.perf_counter()
    for _ in range(MAX_UNFINISHED // WINDOW_ROWS):
        put_in_line(running, Tier.BULK, WINDOW_ROWS, max_tokens=16)
    seconds = time.perf_counter() - began
    costs = cpu_ms_per(running, before, MAX_UNFINISHED)
    forget_jobs(running)
    return {"insert_rows_per_s": MAX_UNFINISHED / seconds, "insert_cpu_ms_postgres": costs["cpu_ms_postgres"]}
