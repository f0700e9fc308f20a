from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from click.testing import CliRunner
from sqlalchemy import create_engine, make_url, text

from app import access
from app.access import Access
from app.children import free_port
from app.cli import main
from app.cli.doctor import Finding, examine
from app.db import migrate
from app.home import Home
from app.settings import Settings
from app.supervisor import Ready

MakeHome = Callable[[], Path]


def _look(subject: str, **settings: Any) -> Finding:
    """The finding on one subject; what comes after it is not looked at."""
    return next(finding for finding in examine(Settings(**settings)) if finding.subject == subject)


def test_doctor_finds_nothing_wrong_with_a_fresh_home(make_home: MakeHome) -> None:
    settings = Settings(home=make_home() / "new", model="echo", port=0, database_url=None, redis_url=None)
    findings = list(examine(settings))
    assert [finding for finding in findings if finding.remedy is not None] == []
    assert [finding.subject for finding in findings] == [
        *["Python", "packages", "home", "disk", "model", "keys", "port", "database", "broker", "torch"]
    ]


def test_doctor_asks_the_service_that_runs_on_the_home(service: Ready, service_home: Path) -> None:
    assert _look("service", home=service_home).says == f"runs and is ready at {service.access.url}"


def test_home_that_cannot_be_made_is_found(make_home: MakeHome) -> None:
    (file := make_home() / "file").touch()
    assert _look("home", home=file / "home").remedy == "set EVERBATCH_HOME to another place"


def test_unprepared_directory_of_a_model_is_found(make_home: MakeHome) -> None:
    finding = _look("model", home=make_home(), model="/no/such/model")
    assert "/no/such/model" in finding.says and finding.remedy is not None


def test_keys_that_others_may_read_are_found(make_home: MakeHome) -> None:
    home = Home(make_home())
    access.keep(home, Access("http://127.0.0.1:1", "paid", "free", "whsec_"))
    assert _look("keys", home=home.path).remedy is None
    home.keys.chmod(0o644)
    assert _look("keys", home=home.path).remedy == f"chmod 600 {home.keys}"
    home.keys.write_text("{}")
    assert "makes new ones" in (_look("keys", home=home.path).remedy or "")


def test_taken_port_is_found(make_home: MakeHome, redis_url: str) -> None:
    taken = make_url(redis_url).port
    assert _look("port", home=make_home(), port=taken).remedy == "set EVERBATCH_PORT, 0 for any"


def test_servers_that_do_not_answer_are_found(make_home: MakeHome, database_url: str) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    silent = {"database_url": f"postgresql+psycopg://user:secret@{nowhere}/db", "redis_url": f"redis://{nowhere}"}
    for subject, setting in (("database", "EVERBATCH_DATABASE_URL"), ("broker", "EVERBATCH_REDIS_URL")):
        finding = _look(subject, home=make_home(), **silent)
        assert setting in (finding.remedy or "")
        assert "secret" not in finding.says


def test_tables_of_a_newer_version_are_found(make_home: MakeHome, empty_database: str, redis_url: str) -> None:
    settings = {"home": make_home(), "database_url": empty_database, "redis_url": redis_url}
    assert "no tables yet" in _look("database", **settings).says
    migrate(empty_database)
    assert "tables up to date" in _look("database", **settings).says

    database = create_engine(empty_database)
    with database.begin() as connection:
        connection.execute(text("update alembic_version set version_num = 'from_the_future'"))
    database.dispose()
    assert _look("database", **settings).remedy == "update Everbatch"


def test_broker_that_may_forget_messages_is_found(make_home: MakeHome, database_url: str, redis_url: str) -> None:
    settings = {"home": make_home(), "database_url": database_url, "redis_url": redis_url}
    with redis.Redis.from_url(redis_url) as client:
        assert _look("broker", **settings).remedy is None
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            assert _look("broker", **settings).remedy == "set its maxmemory-policy to noeviction"
        finally:
            client.config_set("maxmemory-policy", "noeviction")


def test_command_prints_how_to_mend_and_exits_with_1(make_home: MakeHome) -> None:
    (file := make_home() / "file").touch()
    done = CliRunner().invoke(main, ["doctor", "--home", str(file / "home")])
    assert done.exit_code == 1
    assert "PROBLEM  home:" in done.output
    assert "→ set EVERBATCH_HOME to another place" in done.output
