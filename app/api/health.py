"""/healthz: the process lives. /readyz: it can take jobs."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify
from sqlalchemy import NullPool, create_engine, func, select
from sqlalchemy.exc import SQLAlchemyError

from app.api import shapes
from app.api.operations import described
from app.api.services import services
from app.broker import answers
from app.settings import Settings
from app.tables import NOW, Worker

blueprint = Blueprint("health", __name__)

_PROBE_S = 2
"""How long the database and Redis may take to answer, in seconds."""


@blueprint.get("/healthz")
@described(answers={200: shapes.Alive}, is_public=True)
def live() -> Response:
    """The process lives."""
    return jsonify(status="ok")


@blueprint.get("/readyz")
@described(answers={200: shapes.Readiness, 503: shapes.Readiness}, is_public=True)
def ready() -> Response:
    """200 when the database and Redis answer, else 503 naming what does not.

    Workers may be missing: jobs are taken and wait for them.
    """
    settings = services().settings
    workers = _ready_workers(settings)
    has_redis = answers(settings.redis_url or "", _PROBE_S)
    missing = [name for name, found in (("database", workers is not None), ("redis", has_redis)) if not found]
    answer = jsonify(status="unready" if missing else "ready", missing=missing, workers=workers)
    if missing:
        answer.status_code = 503
        answer.headers["Retry-After"] = "2"
    return answer


def _ready_workers(settings: Settings) -> int | None:
    """Workers with a fresh heartbeat that take jobs; None when the database does not answer.

    Asked on a connection of its own: one from the pool would wait for a frozen server for minutes.
    """
    fresh = func.extract("epoch", NOW - Worker.heartbeat_at) < settings.lease_s
    probe = create_engine(
        settings.database_url or "",
        poolclass=NullPool,
        connect_args={"connect_timeout": _PROBE_S, "options": f"-c statement_timeout={_PROBE_S}s"},
    )
    try:
        with probe.connect() as connection:
            return connection.scalar(
                select(func.count()).select_from(Worker).where(Worker.dead.is_(False), Worker.ready, fresh)
            )
    except SQLAlchemyError:
        return None
