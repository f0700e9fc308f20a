"""A service of one's own, for the demo and the benchmarks: `everbatch up` on a fresh home, which is removed at the end;
only the model is kept."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app import embedded
from app.access import Access
from app.children import end, last_line, spawn
from app.commands import PROJECT
from app.db import Database
from app.errors import SetupError
from app.home import Home
from app.models import Model, describe
from app.settings import Settings, environment

_STOP_S = 60.0


@dataclass(frozen=True)
class Service:
    """A running `everbatch up` with one engine worker."""

    access: Access
    worker_pid: int
    """Of the first life of its engine worker."""
    database: Database
    model: Model


@contextmanager
def service(settings: Settings, *, slots: int) -> Iterator[Service]:
    """Start it, and end it with all that it left on the disk.

    Raises SetupError, with what `up` said last, when it does not come up.
    """
    lasting = Home(settings.home)
    lasting.create()
    fresh = Home(Path(tempfile.mkdtemp(prefix="demo-", dir=lasting.path)))
    fresh.create()
    fresh.path.chmod(0o711)  # the embedded Postgres of root runs as another user and passes through
    try:
        _share_models(lasting, fresh)
        ours = settings.model_copy(
            update={
                "home": fresh.path,
                "host": "127.0.0.1",
                "port": 0,
                "metrics_port": 0,
                "max_num_seqs": slots,
                "webhook_allow_private": True,
            }
        )
        with _up(ours) as running:
            yield running
    finally:
        shutil.rmtree(fresh.path)


def _share_models(lasting: Home, fresh: Home) -> None:
    """The converted model outlives the demo, so that the next one starts in seconds."""
    models = lasting.path / "models"
    models.mkdir(exist_ok=True)
    (fresh.path / "models").symlink_to(models)


@contextmanager
def _up(settings: Settings) -> Iterator[Service]:
    log = Home(settings.home).log("up")
    command = [sys.executable, "-m", "app.cli", "up", "--port", "0", "--json"]
    process = spawn(command, environment=environment(settings), cwd=PROJECT, log=log, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        if not ready:
            raise SetupError(f"The service did not start: {last_line(log)}")
        said = json.loads(ready)
        (worker_pid,) = said.pop("worker_pids")
        database = Database(embedded.running_database_url(settings))
        try:
            yield Service(Access(**said), worker_pid, database, describe(settings))
        finally:
            database.close()
    finally:
        end(process, by=signal.SIGTERM, timeout_s=_STOP_S)
        process.stdout.close()
