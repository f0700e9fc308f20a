"""`everbatch up` as an operator meets it: ready, healing, ending, and coming back with the same keys."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner
from cryptography.fernet import Fernet
from sqlalchemy import make_url

from app import access, tenants
from app.children import last_line, spawn, wait_until
from app.cli import main
from app.commands import PROJECT
from app.db import Database
from app.home import Home
from app.settings import Settings, environment
from app.supervisor import Backoff, grant
from app.vault import Vault

_PATIENCE_S = 100.0


@pytest.mark.parametrize(
    ("lives_s", "pauses_s"),
    [
        ([1, 1, 1, 1, 1, 1, 1], [0.5, 1, 2, 4, 8, 10, 10]),  # doubles up to 10 s
        ([1, 1, 30, 1], [0.5, 1, 0.5, 1]),  # a life of 30 s forgives what was before
        ([29, 29], [0.5, 1]),
    ],
)
def test_pause_before_a_new_start_doubles_until_a_life_was_long(lives_s: list[float], pauses_s: list[float]) -> None:
    backoff = Backoff()
    assert [backoff.delay(lived_s) for lived_s in lives_s] == pauses_s


class Up:
    """A running `everbatch up`."""

    def __init__(self, home: Path, process: subprocess.Popen[bytes]) -> None:
        self.home = home
        self.process = process

    def read_ready(self) -> dict[str, Any]:
        """Its JSON line, once it has printed it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.said()
        ready: dict[str, Any] = json.loads(line)
        return ready

    def said(self) -> str:
        return (self.home / "up.log").read_text()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def find(self, what: str) -> psutil.Process | None:
        """The child whose command line has this in it."""
        return next((child for child in self.descendants() if what in " ".join(_command_of(child))), None)


def _command_of(process: psutil.Process) -> list[str]:
    try:
        command: list[str] = process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
    return command


@contextmanager
def _up(home: Path, *options: str, **settings: Any) -> Iterator[Up]:
    """Start `everbatch up` on a home; kill it at the end if it still runs."""
    process = spawn(
        [sys.executable, "-m", "app.cli", "up", "--port", "0", "--json", *options],
        environment=environment(Settings(home=home, database_url=None, redis_url=None, **settings)),
        cwd=PROJECT,
        log=home / "up.log",
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            yield Up(home, process)
        finally:
            process.kill()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.timeout(300)
def test_up_heals_and_ends_in_good_order(make_home: Callable[[], Path]) -> None:
    home = make_home()
    with _up(home, "--engine", "echo") as up:
        ready = up.read_ready()
        assert set(ready) == {"url", "paid_key", "free_key", "webhook_secret", "worker_pids"}
        assert json.loads((home / "keys.json").read_text()) == {k: v for k, v in ready.items() if k != "worker_pids"}
        assert (home / "keys.json").stat().st_mode & 0o777 == 0o600

        # Everything is killed at once: each process comes back, and the service with them.
        victims = ["worker.celery_app:engine", "worker.celery_app:io", "gunicorn", "bin/postgres", "valkey-server"]
        killed = {victim: up.find(victim) for victim in victims}
        for process in killed.values():
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
        engine = killed["worker.celery_app:engine"]
        assert engine is not None and [engine.pid] == ready["worker_pids"]

        def are_all_back() -> bool:
            return all((new := up.find(victim)) is not None and new != old for victim, old in killed.items())

        assert wait_until(are_all_back, _PATIENCE_S), up.said()
        assert wait_until(lambda: _is_ready(ready["url"]), _PATIENCE_S), up.said()

        descendants = up.descendants()
        up.process.terminate()
        assert up.process.wait(_PATIENCE_S) == 0, up.said()
        assert not [process for process in descendants if process.is_running()]
        assert up.said().splitlines()[-1] == "Stopping"
        assert up.process.stdout is not None and up.process.stdout.read() == b""


@pytest.mark.slow  # two more starts
@pytest.mark.timeout(300)
def test_killed_up_takes_its_children_with_it_and_returns_with_the_same_keys(make_home: Callable[[], Path]) -> None:
    home = make_home()
    with _up(home, "--engine", "echo") as up:
        first = up.read_ready()
        descendants = up.descendants()
        assert descendants
        up.process.kill()
        assert psutil.wait_procs(descendants, timeout=_PATIENCE_S)[1] == []
    with _up(home, "--engine", "echo") as up:
        second = up.read_ready()
    for kept in ("paid_key", "free_key", "webhook_secret"):
        assert second[kept] == first[kept]


def test_keys_are_kept_while_they_open_the_database_and_made_anew_when_not(
    make_home: Callable[[], Path], database: str
) -> None:
    home = Home(make_home())
    vault = Vault(Fernet.generate_key().decode())
    db = Database(database)
    try:
        with db.transaction() as session:
            first = grant(session, vault, home, url="http://127.0.0.1:1")
            access.keep(home, first)
            again = grant(session, vault, home, url="http://127.0.0.1:2")
            assert again == replace(first, url="http://127.0.0.1:2")
            assert tenants.authenticate(session, first.paid_key).plan == "paid"
            assert tenants.authenticate(session, first.free_key).plan == "free"

            access.keep(home, replace(first, free_key="of another database"))
            anew = grant(session, vault, home, url="http://127.0.0.1:3")
            assert tenants.authenticate(session, anew.free_key).plan == "free"
            assert anew.webhook_secret == first.webhook_secret
    finally:
        db.close()


def test_taken_port_and_unknown_model_end_up_with_one_line(
    make_home: Callable[[], Path], empty_database: str, redis_url: str
) -> None:
    home = make_home()
    taken = str(make_url(empty_database).port)
    servers = {"EVERBATCH_DATABASE_URL": empty_database, "EVERBATCH_REDIS_URL": redis_url}
    for options, complaint in (
        (["--port", taken], f"Port {taken} of 127.0.0.1 is taken: pass --port or set EVERBATCH_PORT"),
        (["--port", "0", "--model", "/absent"], "EVERBATCH_MODEL: '/absent' has no readable config.json"),
    ):
        done = CliRunner(env=servers).invoke(main, ["up", "--home", str(home), *options])
        assert done.exit_code == 1
        assert done.output.startswith(f"Error: {complaint}")
        assert len(done.output.splitlines()) == 1


@pytest.mark.slow  # a worker imports torch before it can fail to load weights
def test_up_ends_with_the_last_line_of_a_worker_that_cannot_load_its_model(
    make_home: Callable[[], Path], tmp_path: Path
) -> None:
    model = tmp_path / "broken"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64, "vocab_size": 256}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"no weights")
    with _up(make_home(), "--model", str(model)) as up:
        assert up.process.wait(_PATIENCE_S) == 1, up.said()
        complaint = last_line(up.home / "logs/engine1.log")
        assert "cannot be read as safetensors" in complaint
        assert up.said().splitlines()[-1] == f"Error: engine1 cannot start: {complaint}"
