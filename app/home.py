"""The home: the directory that holds the embedded servers' data, models, logs, keys and secrets.

home/                   0711 as root, so that the embedded Postgres, which runs as another user, can pass through
  lock                  held by the process that runs the embedded servers
  postgres/ valkey/     data of the embedded servers
  models/NAME/          converted models
  logs/NAME.log         what the processes of `everbatch up` write
  secrets/NAME          0600 each, made once
  files/ID              bytes of uploaded and generated files
  secret.key            0600, the Fernet key, where EVERBATCH_SECRET_KEY names none
  keys.json             0600, address, keys and webhook secret of `everbatch up`
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import IO

from app.errors import SetupError


class Home:
    """Names the places inside a home. Making one touches nothing; `create` makes the directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.logs = self.path / "logs"
        self.keys = self.path / "keys.json"
        self.lock = self.path / "lock"

    def create(self) -> None:
        """Make the home and its parents where they are missing.

        Raises SetupError when that is not allowed.
        """
        try:
            for directory in [*reversed(self.path.parents), self.path]:
                if not directory.exists():
                    directory.mkdir()
                    directory.chmod(0o755 if directory != self.path else _home_mode())
            self.logs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SetupError(
                f"The home {self.path} cannot be made ({error}): set EVERBATCH_HOME to another place"
            ) from None

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def secret(self, name: str) -> str:
        """The random secret of this name, made at its first use; processes that ask at once get the same."""
        place = self.path / "secrets" / name
        place.parent.mkdir(mode=0o700, exist_ok=True)
        if not place.exists():
            write_private(place, secrets.token_urlsafe(32), replace=False)
        return place.read_text()


class HomeLock:
    """Held by the one process that runs the embedded servers of a home; the kernel frees it when that process ends."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Raises SetupError, naming the holder, when another process has it."""
        file = self._home.lock.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise SetupError(
                f"The home {self._home.path} is in use by process {holder}: "
                "end it, or set EVERBATCH_HOME to another place"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file

    def is_held(self) -> bool:
        """Whether another process has it now; a home that is not there has no lock."""
        try:
            with self._home.lock.open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def write_private(place: Path, text: str, *, replace: bool = True) -> None:
    """Write a file that only its owner may read. A reader sees all of it or nothing of it.

    replace=False leaves a file that another process wrote first.
    """
    draft = place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    if replace:
        draft.replace(place)
        return
    try:
        place.hardlink_to(draft)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def _home_mode() -> int:
    """As root, Postgres runs as another user and must pass through the home, without listing it."""
    return 0o711 if os.geteuid() == 0 else 0o700
