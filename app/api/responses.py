"""/v1/responses: jobs as OpenAI's responses, in the background or waited for, whole or as a stream that can be resumed.

A client that goes away cancels its response, unless it is in the background or has an Idempotency-Key.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

from flask import Blueprint, Response, jsonify, request
from pydantic import Field

from app import choices, jobs, submissions
from app.api import shapes, sse
from app.api.auth import authenticate, tenant
from app.api.bodies import read_object
from app.api.idempotency import idempotency_of
from app.api.operations import Stream, described
from app.api.orders import client_probe, give_up, order, wait_for_end, with_choices
from app.api.pages import checked_id
from app.api.services import Services, services
from app.asked import RESPONSES, endpoint_of, job_id_of, response_id
from app.errors import InvalidRequest, NotFound, StillRunning
from app.events import Event
from app.responses import ResponseEvents, ResponseRequest, in_our_words, response_object
from app.tables import Job

blueprint = Blueprint("responses", __name__, url_prefix=RESPONSES)
blueprint.before_request(authenticate)

_STREAM = Stream("text/event-stream", "Numbered events, with `stream`.")
_MAX_NUMBER = 2**31 - 1
_BOOLEANS = {"true": True, "false": False}


@blueprint.post("")
@described(body=ResponseRequest, headers={"Idempotency-Key": str}, answers={200: (shapes.Response, _STREAM)})
def create() -> Response:
    """Make a response; wait for it unless it is to be made in the background."""
    own = services()
    body = read_object()
    wanted = submissions.validated(ResponseRequest, body)
    idempotency = idempotency_of(body, endpoint=RESPONSES)
    try:
        job = order(wanted.as_job(), idempotency=idempotency, asked=wanted.asked()).job
    except InvalidRequest as refusal:
        raise in_our_words(refusal) from None
    is_kept = wanted.background or idempotency is not None
    abandon = None if is_kept else partial(give_up, own, tenant().id, job.id)
    if wanted.stream:
        return _streamed(own, job, after=-1, on_leave=abandon)
    if wanted.background:
        return jsonify(_found(job.id))
    is_there = client_probe()
    is_wanted = is_there if abandon is not None else lambda: True
    if not wait_for_end(job.id, seconds=own.settings.max_wait_s, is_wanted=is_wanted):
        if abandon is not None and not is_there():
            abandon()
        raise StillRunning(job.id)
    return jsonify(_found(job.id))


@blueprint.get("/<response_id>")
@described(
    query={
        "stream": bool,
        "starting_after": Annotated[int, Field(ge=0, le=_MAX_NUMBER)],
        "include_obfuscation": bool,
    },
    answers={200: (shapes.Response, _STREAM)},
)
def read(response_id: str) -> Response:
    """The response as it stands; with `stream` its events, behind number `starting_after`."""
    job_id = _job_id(response_id)
    shown = _found(job_id)
    if not _asked_to_stream():
        return jsonify(shown)
    own = services()
    with own.database.autocommit() as session:
        job = jobs.find(session, tenant().id, job_id, with_output=False)
    return _streamed(own, job, after=_starting_after())


@blueprint.post("/<response_id>/cancel")
@described(answers={200: shapes.Response})
def cancel(response_id: str) -> Response:
    """From the commit on no further text is shown or charged. A body is ignored: clients send an empty one."""
    own = services()
    job_id = _job_id(response_id)
    _found(job_id)
    with own.database.transaction() as session:
        moved = jobs.cancel(session, tenant().id, job_id)[1]
    own.publish(moved)
    own.dispatcher.nudge()
    return jsonify(_found(job_id))


@blueprint.delete("/<response_id>")
@described(answers={200: shapes.DeletedResponse})
def delete(response_id: str) -> Response:
    """Cancel the response if it has not ended, and forget it."""
    own = services()
    job_id = _job_id(response_id)
    _found(job_id)
    with own.database.transaction() as session:
        moved = jobs.remove(session, tenant().id, job_id)
    own.publish(moved)
    return jsonify(id=response_id, object="response", deleted=True)


def _job_id(text: str) -> str:
    """The id of the job behind a path's response id. Raises NotFound."""
    return job_id_of(checked_id("resp", text))


def _found(job_id: str) -> dict[str, Any]:
    """The tenant's response. Raises NotFound, also for a job that was not asked for as one."""
    with services().database.autocommit() as session:
        try:
            job, (choice, *_) = with_choices(session, job_id)
        except NotFound:
            raise _no_response(job_id) from None
    if endpoint_of(job) != RESPONSES:
        raise _no_response(job_id)
    return response_object(job, choice)


def _no_response(job_id: str) -> NotFound:
    return NotFound(f"There is no response '{response_id(job_id)}'", param="id")


def _streamed(own: Services, job: Job, *, after: int, on_leave: Any = None) -> Response:
    """The events with numbers above after. All are made anew, for each number follows from those before it."""
    tenant_id = tenant().id

    def at_end() -> dict[str, Any]:
        with own.database.autocommit() as session:
            ended = jobs.find(session, tenant_id, job.id)
            (choice, *_) = choices.of_one(session, ended)
            return response_object(ended, choice)

    made = ResponseEvents(job, at_end)

    def show(event: Event) -> Iterable[bytes]:
        for each in made.of(event):
            if each["sequence_number"] > after:
                yield sse.data(each, kind=each["type"])

    return sse.streamed(job.id, show, on_leave=on_leave)


def _asked_to_stream() -> bool:
    text = request.args.get("stream", "false")
    if text not in _BOOLEANS:
        raise InvalidRequest("stream must be true or false", param="stream")
    return _BOOLEANS[text]


def _starting_after() -> int:
    text = request.args.get("starting_after")
    if text is None:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _MAX_NUMBER):
        raise InvalidRequest("starting_after must be the number of an event", param="starting_after")
    return int(text)
