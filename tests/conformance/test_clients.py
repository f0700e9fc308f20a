"""The suite beside this file, run with the stock clients of three majors, against one running service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import func, select, update

from app import tenants
from app.children import wait_until
from app.client import Client
from app.db import Database
from app.embedded import running_database_url
from app.ids import new_id
from app.moves import Status
from app.settings import Settings
from app.supervisor import Ready
from app.tables import NOW, Batch, Job
from app.tenants import Scope
from app.tiers import Plan
from app.vault import Vault
from tests.conformance.clients import python_with

SUITE = Path(__file__).parent / "suite"
INSTALLED = "installed"
"""The client that our own environment has."""


@dataclass(frozen=True)
class Operator:
    """Who has the service's database in his hands."""

    database: Database
    vault: Vault

    def new_key(self, *, scope: Scope = Scope.JOBS, **limits: int) -> str:
        """The key of a new tenant."""
        name = new_id("conformance")
        with self.database.transaction() as session:
            made = tenants.provision(session, self.vault, name=name, plan=Plan.PAID, scope=scope)
            tenants.set_limits(session, name, **limits)
        return made.key

    def expire_once_one_row_is_done(self, batch_id: str) -> None:
        def one_is_done() -> bool:
            with self.database.transaction() as session:
                done = [Job.batch_id == batch_id, Job.status == Status.SUCCEEDED]
                return session.scalar(select(func.count()).select_from(Job).where(*done)) == 1

        assert wait_until(one_is_done, 30)
        with self.database.transaction() as session:
            session.execute(update(Batch).where(Batch.id == batch_id).values(expires_at=NOW))
            session.execute(update(Job).where(Job.batch_id == batch_id).values(deadline_at=NOW))


@contextmanager
def operator(home: Path) -> Iterator[Operator]:
    settings = Settings(home=home, database_url=None)
    database = Database(running_database_url(settings))
    try:
        yield Operator(database, Vault.open(settings))
    finally:
        database.close()


def begin_long_batch(service: Ready, key: str, directory: Path) -> str:
    """A batch of which one row ends at once, and two do not for half a minute."""
    url = "/v1/completions"
    path = directory / "long.jsonl"
    with path.open("w") as file:
        for custom_id, max_tokens in (("short", 1), ("long", 7000), ("other", 7000)):
            body = {"model": "echo", "prompt": "x", "max_tokens": max_tokens}
            print(json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}), file=file)
    with Client(service.access.url, key) as client:
        return client.create_batch(client.upload(path)["id"], endpoint=url)["id"]


CASES = [
    pytest.param(INSTALLED, True, False, id="installed-strict-sync"),
    *(
        pytest.param(major, is_strict, is_async, id=f"{major}-{strictness}-{style}", marks=pytest.mark.slow)
        for major in (1, 2, 3)
        for is_strict, strictness in ((True, "strict"), (False, "lax"))
        for is_async, style in ((False, "sync"), (True, "async"))
    ),
]


@pytest.mark.parametrize(("client", "is_strict", "is_async"), CASES)
def test_the_stock_client_is_content(
    service: Ready, service_home: Path, tmp_path: Path, client: int | str, is_strict: bool, is_async: bool
) -> None:
    python = sys.executable if client == INSTALLED else python_with(int(client))
    with operator(service_home) as hand:
        key = hand.new_key()
        batch_id = begin_long_batch(service, key, tmp_path)
        given = {
            "url": service.access.url,
            "key": key,
            "free_key": service.access.free_key,
            "admin_key": hand.new_key(scope=Scope.ADMIN),
            "rated_key": hand.new_key(requests_per_minute=1),
            "poor_key": hand.new_key(tokens_per_day=10),
            "expired_batch": batch_id,
            "is_strict": is_strict,
            "is_async": is_async,
        }
        process = subprocess.Popen(
            [python, "-m", "pytest", "-c", "pytest.ini", "-q", "-rs"],
            env=environment() | {"CONFORMANCE": json.dumps(given)},
            cwd=SUITE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            hand.expire_once_one_row_is_done(batch_id)
            said, _ = process.communicate(timeout=110)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, said


def environment() -> dict[str, str]:
    """Ours, without what would change the client, its way to the service, or the suite's pytest."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and not name.startswith(("OPENAI_", "PYTEST_", "PYTHON"))
    }
    return kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
