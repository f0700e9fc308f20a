"""What the tests share: a home with real servers, started once, and fresh databases in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, make_url, text

from app.access import Access
from app.children import spawn
from app.commands import PROJECT
from app.db import migrate
from app.embedded import Servers
from app.settings import Settings, environment
from app.supervisor import Ready

# Before anything imports torch: threads that spin while they wait take the cores from the other processes of a test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The storm first: it takes longest, and mostly waits; at the end one process would wait for it."""
    items.sort(key=lambda item: "test_storm" not in item.nodeid)


@pytest.fixture(scope="session")
def make_home() -> Iterator[Callable[[], Path]]:
    """Makes directories that the embedded Postgres can enter when root runs the tests; removed at the end."""
    made: list[Path] = []

    def make() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="everbatch-test-")))
        made[-1].chmod(0o755)
        return made[-1]

    yield make
    for directory in made:
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def home(make_home: Callable[[], Path]) -> Path:
    return make_home()


@pytest.fixture(scope="session")
def servers(home: Path) -> Iterator[Servers]:
    """Postgres and Valkey, started once for all tests, or the operator's own where the environment names them."""
    with Servers.start(Settings(home=home)) as servers:
        yield servers


@pytest.fixture(scope="session")
def database_url(servers: Servers) -> str:
    return servers.database_url


@pytest.fixture(scope="session")
def redis_url(servers: Servers) -> str:
    return servers.redis_url


@pytest.fixture(scope="session")
def migrated_template(database_url: str) -> Iterator[str]:
    """A database with all tables that fresh ones are copied from: a copy takes milliseconds, a migration does not."""
    name = f"template_{uuid4().hex}"
    with _new_database(database_url, name) as url:
        migrate(url)
        yield name


@pytest.fixture(scope="module")
def database(database_url: str, migrated_template: str) -> Iterator[str]:
    """The URL of a fresh database with all tables, for one test module alone."""
    with _new_database(database_url, f"test_{uuid4().hex}", template=migrated_template) as url:
        yield url


@pytest.fixture
def empty_database(database_url: str) -> Iterator[str]:
    """The URL of a database without tables, for one test."""
    with _new_database(database_url, f"test_{uuid4().hex}") as url:
        yield url


@pytest.fixture(scope="session")
def service_home(make_home: Callable[[], Path]) -> Path:
    return make_home()


@pytest.fixture(scope="session")
def service(service_home: Path) -> Iterator[Ready]:
    """A whole service for all tests, as `everbatch up` starts it: echo engine, one worker, webhooks to anywhere."""
    settings = Settings(home=service_home, database_url=None, redis_url=None, webhook_allow_private=True)
    up = spawn(
        [sys.executable, "-m", "app.cli", "up", "--engine", "echo", "--port", "0", "--json"],
        environment=environment(settings),
        cwd=PROJECT,
        log=service_home / "up.log",
        stdout=subprocess.PIPE,
    )
    with up:
        assert up.stdout is not None
        said = json.loads(up.stdout.readline() or "{}")
        assert said, (service_home / "up.log").read_text()
        pids = said.pop("worker_pids")
        yield Ready(Access(**said), "echo", pids)
        up.terminate()
    assert up.returncode == 0, (service_home / "up.log").read_text()


@contextmanager
def _new_database(server_url: str, name: str, *, template: str = "template1") -> Iterator[str]:
    """A database that is dropped at the end, with whoever is still connected to it."""
    server = create_engine(server_url, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"create database {name} template {template}"))
    try:
        yield make_url(server_url).set(database=name).render_as_string(hide_password=False)
    finally:
        with server.connect() as connection:
            connection.execute(text(f"drop database {name} with (force)"))
        server.dispose()
