"""The command lines of the service's processes: `everbatch up` and docker-compose.yml run the very same ones."""

from __future__ import annotations

import sys
from pathlib import Path

from app.settings import Settings

PROJECT = Path(__file__).parent.parent
"""Where every process runs."""
CANNOT_START = 78
"""The exit code (EX_CONFIG) of a process for which a new start would not help; its last line says why."""
API_GRACE_S = 5
"""Open streams get so long to end when the API stops, in seconds; their clients resume at the next start."""
API_KEEP_ALIVE_S = 10
"""An idle connection stays open for so long, in seconds: for longer than clients keep theirs (httpx 5 s), or one would
be closed at the moment when its client uses it again."""


def api_command(settings: Settings) -> list[str]:
    """The API: gunicorn, one process, a thread per request or stream."""
    return [
        *[sys.executable, "-m", "gunicorn", "app.api:create_app()"],
        *["--bind", f"{settings.host}:{settings.port}"],
        *["--workers", str(settings.api_workers)],
        *["--worker-class", "app.api.server.Worker", "--threads", str(settings.api_threads)],
        *["--worker-connections", str(max(1000, 2 * settings.api_threads))],  # half of them may be idle
        *["--graceful-timeout", str(API_GRACE_S)],
        *["--keep-alive", str(API_KEEP_ALIVE_S)],
        *["--worker-tmp-dir", "/dev/shm"],  # its heartbeat file must not wait for a disk
        "--no-control-socket",
    ]


def engine_command(number: int = 1) -> list[str]:
    """An engine worker: one process, one model."""
    return _celery_command("engine", f"engine{number}@%h")


def io_command() -> list[str]:
    """The io worker: dispatch on a timer, sweep, batches, deliveries."""
    return _celery_command("io", "io@%h")


def migrate_command() -> list[str]:
    """Brings the tables up to date and ends. `everbatch up` does it within itself."""
    return [sys.executable, "-m", "alembic", "upgrade", "head"]


def _celery_command(application: str, name: str) -> list[str]:
    return [
        *[sys.executable, "-m", "celery", "-A", f"worker.celery_app:{application}", "worker"],
        *["--hostname", name, "--loglevel", "INFO"],
        # Leases in Postgres say who lives. Heartbeats are left on for monitors: without, Celery has no dispatcher of
        # events, and Flower cannot ask for those of tasks.
        *["--without-gossip", "--without-mingle"],
    ]
