"""The embedded servers: they keep what they answered for, heal, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.children import wait_until
from app.embedded import Servers
from app.errors import SetupError
from app.settings import Settings

_PATIENCE_S = 30.0


def _execute(servers: Servers, statement: str) -> list[tuple[object, ...]]:
    url = servers.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url, connect_timeout=2) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def _redis(servers: Servers) -> redis.Redis:
    return redis.Redis.from_url(servers.redis_url, decode_responses=True)


def _answer(servers: Servers) -> bool:
    assert servers.postgres is not None and servers.valkey is not None
    return servers.postgres.answers() and servers.valkey.answers()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _pids(servers: Servers) -> tuple[int, int]:
    assert servers.postgres is not None and servers.valkey is not None
    assert servers.postgres.pid is not None and servers.valkey.pid is not None
    return servers.postgres.pid, servers.valkey.pid


@pytest.fixture(scope="module")
def own_home(make_home: Callable[[], Path]) -> Path:
    return make_home()


@pytest.fixture
def own_servers(own_home: Path) -> Iterator[Servers]:
    """Servers of this module alone, which its tests may kill."""
    with Servers.start(Settings(home=own_home, database_url=None, redis_url=None)) as servers:
        yield servers


def test_killed_servers_come_back_on_their_ports_with_their_data(own_servers: Servers) -> None:
    _execute(own_servers, "create table kept (n int)")
    _execute(own_servers, "insert into kept values (42)")
    with _redis(own_servers) as client:
        client.set("kept", "43")
    urls = own_servers.database_url, own_servers.redis_url
    assert own_servers.poll() == []

    for pid in _pids(own_servers):
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: own_servers.poll() == ["postgres", "valkey"], _PATIENCE_S)
    assert own_servers.restart_dead() == ["postgres", "valkey"]

    assert wait_until(lambda: _answer(own_servers), _PATIENCE_S)
    assert (own_servers.database_url, own_servers.redis_url) == urls
    assert _execute(own_servers, "select n from kept") == [(42,)]
    with _redis(own_servers) as client:
        assert client.get("kept") == "43"


def test_second_start_on_a_home_in_use_names_the_holder(own_servers: Servers) -> None:
    with pytest.raises(SetupError, match=f"in use by process {os.getpid()}"):
        Servers.start(Settings(home=own_servers.home.path))


def test_servers_end_with_a_killed_parent_and_start_again_with_their_data(own_home: Path) -> None:
    program = f"""if True:
        import pathlib, signal
        from app.embedded import Servers
        from app.settings import Settings
        servers = Servers.start(Settings(home=pathlib.Path({str(own_home)!r})))
        print(servers.postgres.pid, servers.valkey.pid, flush=True)
        signal.pause()
    """
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(_is_running, pids))
        parent.kill()
    # At once, while the orphans may still be shutting down: the new start waits for them.
    with Servers.start(Settings(home=own_home)) as servers:
        assert not any(map(_is_running, pids))
        assert _execute(servers, "select n from kept") == [(42,)]
        with _redis(servers) as client:
            assert client.get("kept") == "43"


def test_two_homes_run_side_by_side(servers: Servers, own_servers: Servers) -> None:
    _execute(own_servers, "create table only_here (n int)")
    assert _execute(servers, "select to_regclass('only_here')") == [(None,)]
    with _redis(servers) as client:
        assert client.get("kept") is None


def test_stop_ends_both_processes_and_frees_the_home(own_home: Path) -> None:
    servers = Servers.start(Settings(home=own_home))
    pids = _pids(servers)
    servers.stop()
    assert not any(map(_is_running, pids))
    servers.stop()
    with Servers.start(Settings(home=own_home)):
        pass


def test_servers_that_the_settings_name_are_not_started(make_home: Callable[[], Path], servers: Servers) -> None:
    settings = Settings(home=make_home(), database_url=servers.database_url, redis_url=servers.redis_url)
    with Servers.start(settings) as given:
        assert (given.postgres, given.valkey) == (None, None)
        assert given.database_url == servers.database_url
        assert given.redis_url == servers.redis_url


def test_servers_refuse_a_wrong_password(own_servers: Servers) -> None:
    assert own_servers.postgres is not None and own_servers.valkey is not None
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(host="127.0.0.1", port=own_servers.postgres.port, user="everbatch", password="guess")
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=own_servers.valkey.port, retry=once) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_secrets_and_data_are_private(own_servers: Servers) -> None:
    home = own_servers.home.path
    for place in (home / "secrets", home / "postgres", home / "valkey", home / "logs"):
        assert place.stat().st_mode & 0o077 == 0, place
    for place in [*(home / "secrets").iterdir(), home / "valkey/valkey.conf"]:
        assert place.stat().st_mode & 0o777 == 0o600, place


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts Postgres as another user")
def test_home_that_nobody_can_enter_is_refused_by_name(make_home: Callable[[], Path]) -> None:
    closed = make_home()
    closed.chmod(0o700)
    with pytest.raises(SetupError, match="EVERBATCH_HOME"):
        Servers.start(Settings(home=closed / "home", database_url=None))


def test_home_that_cannot_be_made_is_refused_by_name(make_home: Callable[[], Path]) -> None:
    file = make_home() / "file"
    file.touch()
    with pytest.raises(SetupError, match="EVERBATCH_HOME"):
        Servers.start(Settings(home=file / "home"))


def test_servers_start_in_the_main_thread_only(make_home: Callable[[], Path]) -> None:
    failures: list[BaseException] = []

    def start() -> None:
        try:
            Servers.start(Settings(home=make_home(), database_url=None, redis_url=None))
        except AssertionError as error:
            failures.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert len(failures) == 1
