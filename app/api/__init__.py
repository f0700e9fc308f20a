"""The HTTP face: routes, errors, event streams. gunicorn runs `app.api:create_app()`."""

from __future__ import annotations

import time

from flask import Flask, Response, g, request

from app.api import (
    admin,
    batches,
    completions,
    deliveries,
    endpoints,
    errors,
    events,
    files,
    health,
    jobs,
    models,
    openapi,
    responses,
    uploads,
    usage,
    waiting,
)
from app.api.auth import rate_headers
from app.api.services import install, services
from app.ids import new_id
from app.settings import Settings, get_settings

_BLUEPRINTS = (
    health.blueprint,
    models.blueprint,
    jobs.blueprint,
    completions.blueprint,
    responses.blueprint,
    events.blueprint,
    files.blueprint,
    uploads.blueprint,
    batches.blueprint,
    endpoints.blueprint,
    deliveries.blueprint,
    usage.blueprint,
    waiting.blueprint,
    admin.blueprint,
    openapi.blueprint,
)


def create_app(settings: Settings | None = None) -> Flask:
    """The WSGI application. Threads and connections are opened at its first request in each process.

    Raises SetupError when it cannot serve with these settings.
    """
    app = Flask("everbatch", static_folder=None)
    install(app, settings or get_settings())
    app.json.sort_keys = False  # type: ignore[attr-defined]
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False
    app.before_request(_start)
    app.after_request(_finish)
    errors.register(app)
    for blueprint in _BLUEPRINTS:
        app.register_blueprint(blueprint)
    return app


def _start() -> None:
    g.started_at = time.perf_counter()
    g.request_id = new_id("req")


def _finish(response: Response) -> Response:
    """Headers of every answer, and its time."""
    response.headers["x-request-id"] = g.request_id
    response.headers.update(rate_headers())
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers["X-Content-Type-Options"] = "nosniff"
    # Where no route matched, path and method are the client's own words: labels of them would have no end.
    labels = (request.method, request.url_rule.rule) if request.url_rule is not None else ("any", "unmatched")
    services().metrics.request_seconds.labels(*labels).observe(time.perf_counter() - g.started_at)
    return response
