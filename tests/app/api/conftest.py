"""The API's application on real servers, called in this process or as a gunicorn process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from flask import Flask
from werkzeug.test import TestResponse

from app import tenants
from app.api import create_app
from app.api.services import services_of
from app.children import end, free_port, wait_until
from app.commands import PROJECT
from app.db import Database
from app.settings import Settings, environment
from app.tables import Tenant


@pytest.fixture(scope="module")
def app(settings: Settings) -> Iterator[Flask]:
    app = create_app(settings)
    yield app
    services_of(app).close()


@dataclass(frozen=True)
class Caller:
    """Calls the application with one key."""

    app: Flask
    key: str

    def __call__(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, **options: Any
    ) -> TestResponse:
        sent = {"Authorization": f"Bearer {self.key}", **(headers or {})}
        return self.app.test_client().open(path, method=method, headers=sent, **options)

    def submit(self, *, headers: dict[str, str] | None = None, **body: Any) -> TestResponse:
        return self("POST", "/v1/jobs", headers=headers, json={"prompt": "hello", **body})


@pytest.fixture
def call(app: Flask, owner: Any) -> Caller:
    return Caller(app, owner.key)


@pytest.fixture
def call_as(app: Flask) -> Callable[[Any], Caller]:
    return lambda owner: Caller(app, owner.key)


@pytest.fixture
def limit(db: Database, owner: Any) -> Callable[..., None]:
    """Sets limits of the test's tenant."""

    def change(**limits: Any) -> None:
        with db.transaction() as session:
            name = session.get_one(Tenant, owner.tenant_id).name
            tenants.set_limits(session, name, **limits)

    return change


@dataclass(frozen=True)
class Server:
    """A gunicorn process with the application."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def _serving(settings: Settings, log: Path, *options: str) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "app.api:create_app()", "--bind", f"127.0.0.1:{port}"]
    command += ["--worker-class", "app.api.server.Worker", "--threads", str(settings.api_threads)]
    command += ["--graceful-timeout", "30", "--no-control-socket", *options]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment(settings), cwd=PROJECT, stdout=output, stderr=output)
    try:
        server = Server(f"http://127.0.0.1:{port}", process, log)
        assert wait_until(lambda: process.poll() is not None or _answers(server.url), 30)
        yield server
    finally:
        end(process, by=signal.SIGTERM, timeout_s=35)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Server]]:
    """Runs a gunicorn process with settings and more options of gunicorn, ready to answer or ended."""

    def serve(settings: Settings, *options: str) -> AbstractContextManager[Server]:
        return _serving(settings, tmp_path_factory.mktemp("gunicorn") / "log", *options)

    return serve


@pytest.fixture(scope="module")
def server(serving: Callable[..., AbstractContextManager[Server]], settings: Settings) -> Iterator[Server]:
    """A gunicorn process for the module; it beats every 0.2 s and serves two event streams."""
    with serving(settings.model_copy(update={"sse_heartbeat_s": 0.2, "api_threads": 34})) as server:
        yield server
