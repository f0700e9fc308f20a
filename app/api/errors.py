"""Errors as answers: always JSON, a problem document (RFC 9457) that also holds OpenAI's error object.

{"type", "title", "status", "detail", "instance", "error": {"message", "type", "param", "code"}}
"""

from __future__ import annotations

import json
import logging
from http import HTTPStatus

from flask import Flask, Response, g, request
from gunicorn.http.errors import ParseException
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from app.api.services import services
from app.errors import EndedBadly, MalformedBody, PayloadTooLarge, Refusal, Unauthenticated, Unavailable
from app.moves import Status
from app.tables import Job

logger = logging.getLogger(__name__)

CONTENT_TYPE = "application/problem+json"
DATABASE_AWAY = (OperationalError, InterfaceError, InternalError, PoolTimeout)
"""What SQLAlchemy raises while the database does not answer, answers nobody more, or gave up on a transaction."""


def register(app: Flask) -> None:
    """Answer every exception of the app's routes, and of routes that do not exist."""
    app.register_error_handler(Refusal, _refused)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(ParseException, _broken_chunks)
    for kind in DATABASE_AWAY:
        app.register_error_handler(kind, _database_away)
    app.register_error_handler(Exception, _unexpected)


def _refused(refusal: Refusal) -> Response:
    answer = problem(refusal.status, refusal.code, refusal.message, param=refusal.param, job_id=refusal.job_id)
    if refusal.retry_after_s is not None:
        answer.headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.should_retry is not None:
        answer.headers["x-should-retry"] = str(refusal.should_retry).lower()
    if refusal.job_id is not None:
        answer.headers["Location"] = f"/v1/jobs/{refusal.job_id}"
    if isinstance(refusal, Unauthenticated):
        answer.headers["WWW-Authenticate"] = 'Bearer realm="everbatch"'
    return answer


def _http_error(error: HTTPException) -> Response:
    """What the routing or Werkzeug refused, with the headers that it wants, Allow for instance."""
    if isinstance(error, RequestEntityTooLarge):
        return _refused(PayloadTooLarge())
    status = HTTPStatus(error.code or 500)
    answer = problem(status, status.name.lower(), error.description or status.phrase)
    for name, value in error.get_headers():
        if name.lower() != "content-type":
            answer.headers[name] = value
    return answer


def _broken_chunks(error: Exception) -> Response:
    """The server reads a chunked body while we do, and finds its mistakes then."""
    return _refused(MalformedBody("The body is not in well-formed chunks"))


def _database_away(error: Exception) -> Response:
    logger.warning("%s: the database does not answer: %s", g.get("request_id"), type(error).__name__)
    return _refused(Unavailable("The database does not answer at the moment"))


def _unexpected(error: Exception) -> Response:
    logger.error("%s: unexpected error at %s", g.get("request_id"), request.url_rule, exc_info=error)
    return problem(500, "internal_error", "An unexpected error; the server's log has more under the request id")


def ended_badly(job: Job) -> EndedBadly:
    """What somebody is told who waited for a job that failed, expired or was cancelled."""
    error = job.error or {}
    message = error.get("message") or f"Job '{job.id}' has {job.status}"
    status = HTTPStatus.CONFLICT if job.status == Status.CANCELLED else HTTPStatus.INTERNAL_SERVER_ERROR
    return EndedBadly(job.id, message, code=error.get("code") or f"job_{job.status}", status=status)


def problem(status: int, code: str, detail: str, *, param: str | None = None, job_id: str | None = None) -> Response:
    """An error's answer, counted by its code."""
    services().metrics.refusals.labels(code).inc()
    body = document(status, code, detail, param=param, instance=request.path, job_id=job_id)
    return Response(body, status=status, content_type=CONTENT_TYPE)


def document(
    status: int,
    code: str,
    detail: str,
    *,
    param: str | None = None,
    instance: str | None = None,
    job_id: str | None = None,
) -> str:
    """The JSON text of an error; instance is the path that was asked for, where one could be read."""
    error = {"message": detail, "type": _openai_type(status), "param": param, "code": code}
    members = {
        "type": f"urn:everbatch:error:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": instance,
        "job_id": job_id,
        "error": error if job_id is None else {**error, "job_id": job_id},
    }
    return json.dumps({name: value for name, value in members.items() if value is not None}) + "\n"


def _openai_type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 429:
            return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
