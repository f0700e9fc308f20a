"""/v1/chat/completions and /v1/completions: jobs that their clients wait for, whole or as a stream.

A client that goes away cancels its job, unless it sent an Idempotency-Key, by which it may come again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from flask import Blueprint, Response, jsonify

from app import submissions
from app.api import shapes, sse
from app.api.auth import authenticate, tenant
from app.api.bodies import read_object
from app.api.errors import ended_badly
from app.api.idempotency import idempotency_of
from app.api.operations import Stream, described
from app.api.orders import client_probe, give_up, order, wait_for_end, with_choices
from app.api.services import services
from app.asked import CHAT, COMPLETIONS, asked
from app.completions import Chunks, completion_object
from app.errors import StillRunning
from app.events import Event
from app.moves import Status
from app.submissions import ChatCompletion, Completion

blueprint = Blueprint("completions", __name__, url_prefix="/v1")
blueprint.before_request(authenticate)

_STREAM = Stream("text/event-stream", "Chunks, with `stream`.")
_HEADERS = {"Idempotency-Key": str}


@blueprint.post("/chat/completions")
@described(body=ChatCompletion, headers=_HEADERS, answers={200: (shapes.ChatCompletion, _STREAM)})
def chat() -> Response:
    """The model's answer to a chat."""
    return _completed(CHAT)


@blueprint.post("/completions")
@described(body=Completion, headers=_HEADERS, answers={200: (shapes.TextCompletion, _STREAM)})
def complete() -> Response:
    """How the model goes on with a text."""
    return _completed(COMPLETIONS)


def _completed(endpoint: str) -> Response:
    own = services()
    body = read_object()
    wanted = submissions.validated(submissions.BODIES[endpoint], body)
    idempotency = idempotency_of(body, endpoint=endpoint)
    submitted = order(wanted.as_job(), idempotency=idempotency, asked=asked(endpoint, wanted.service_tier))
    job = submitted.job
    abandon = None if idempotency is not None else partial(give_up, own, tenant().id, job.id)
    if wanted.stream:
        return sse.streamed(
            job.id, partial(_shown, Chunks(job, endpoint, with_usage=wanted.wants_usage)), on_leave=abandon
        )
    is_there = client_probe()
    is_wanted = is_there if abandon is not None else lambda: True
    if not wait_for_end(job.id, seconds=own.settings.max_wait_s, is_wanted=is_wanted):
        if abandon is not None and not is_there():
            abandon()
        raise StillRunning(job.id)
    with own.database.autocommit() as session:
        ended, its_choices = with_choices(session, job.id)
    if ended.status != Status.SUCCEEDED:
        raise ended_badly(ended)
    return jsonify(completion_object(ended, its_choices, endpoint))


def _shown(chunks: Chunks, event: Event) -> Iterable[bytes]:
    for chunk in chunks.of(event):
        yield sse.data(chunk)
    if event.kind == Status.SUCCEEDED:
        yield sse.DONE
    elif event.ends_log:
        error = event.data.get("error") or {}
        yield sse.error(
            error.get("message") or f"Job '{event.job_id}' has {event.kind}",
            code=error.get("code") or f"job_{event.kind}",
        )
