"""The two Celery applications, named on the command line:

    celery -A worker.celery_app:engine worker    runs jobs: one process, one model, one continuous batch
    celery -A worker.celery_app:io worker        dispatches, sweeps, posts webhooks; imports no engine

What only one of them needs is named as text, and imported there alone. A process that cannot start says why in one line
on stderr and exits with CANNOT_START.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from celery import Celery, signals
from pydantic import ValidationError

from app import logs, models
from app.broker import DELIVERIES, GENERATE, celery_app, queue_name
from app.commands import CANNOT_START
from app.errors import SetupError
from app.settings import Settings, complaint, get_settings
from app.tiers import Tier
from worker.tasks import JobsFailed, generate

IO_THREADS = 16
"""Webhooks posted at once."""

# Idle OpenMP threads sleep instead of spinning, and leave the cores to the other processes. Read by the OpenMP library
# when torch is imported, which the engine's pool does after this.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _make_engine(settings: Settings, redis_url: str) -> Celery:
    """The engine worker's: the queues of its model's tiers, read as Intake says, worked off by EnginePool."""
    model = models.describe(settings).name
    app = celery_app(
        "engine",
        redis_url,
        [queue_name(model, tier) for tier in Tier],
        queue_order_strategy="worker.intake:Intake",
        # How long a BRPOP waits, in seconds: a tier that the engine has just got room for is read that much later.
        polling_interval=0.1,
    )
    app.conf.update(
        worker_pool="worker.pool:EnginePool",
        worker_consumer="worker.consumer:Consumer",
        worker_concurrency=settings.max_num_seqs,
        # No prefetch limit. Intake holds back before the pop, where the message is still anybody's.
        worker_prefetch_multiplier=0,
        worker_redirect_stdouts=False,
    )
    app.task(name=GENERATE, throws=(JobsFailed,), shared=False)(generate)
    return app


def _make_io(redis_url: str) -> Celery:
    """The io worker's: threads for webhooks, and the clock."""
    app = celery_app("io", redis_url, [DELIVERIES], queue_order_strategy="worker.intake:Turns")
    app.conf.update(
        worker_pool="threads",
        worker_consumer="worker.consumer:Consumer",
        worker_concurrency=IO_THREADS,
        # No prefetch limit: no more is sent than may be in flight.
        worker_prefetch_multiplier=0,
        worker_redirect_stdouts=False,
    )
    app.conf.include = ["worker.deliveries"]
    app.steps["worker"].add("worker.clock:ClockStep")
    return app


def _make() -> tuple[Celery, Celery]:
    settings = get_settings()
    for url, variable in ((settings.database_url, "DATABASE_URL"), (settings.redis_url, "REDIS_URL")):
        if not url:
            raise SetupError(f"EVERBATCH_{variable} is not set: a worker needs it, or start all with `everbatch up`")
    assert settings.redis_url
    return _make_engine(settings, settings.redis_url), _make_io(settings.redis_url)


@signals.celeryd_init.connect  # type: ignore[untyped-decorator]
def _set_up_logs(instance: Any, **_: Any) -> None:
    logs.setup(instance.app.main)
    for name in ("celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(name).setLevel(logging.WARNING)  # two lines for each message otherwise


@signals.setup_logging.connect  # type: ignore[untyped-decorator]
def _keep_logs(**_: Any) -> None:
    """That somebody listens keeps Celery from setting up logs of its own."""


try:
    engine, io = _make()
except (SetupError, ValidationError) as error:
    sys.stderr.write(f"{complaint(error)}\n")
    raise SystemExit(CANNOT_START) from None
