"""/v1/jobs/{id}/events: a job's event log as server-sent events, from any number, to the terminal event.

A block is `id: NUMBER`, `event: KIND`, `data: JSON` and an empty line. A heartbeat is a comment with one newline: stock
clients take a comment and an empty line behind an id for a broken event.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Annotated

from flask import Blueprint, Response, request
from pydantic import Field
from werkzeug.exceptions import MethodNotAllowed

from app import events, jobs
from app.api.auth import authenticate, tenant
from app.api.errors import DATABASE_AWAY
from app.api.operations import Stream, described
from app.api.pages import checked_id
from app.api.services import Services, services
from app.errors import InvalidRequest
from app.events import Event
from app.moves import Status

logger = logging.getLogger(__name__)

blueprint = Blueprint("events", __name__, url_prefix="/v1/jobs")
blueprint.before_request(authenticate)

_HEARTBEAT = b": hb\n"
_MAX_NUMBER = 2**31 - 1
"""Of an event: what its column holds."""


_NUMBER = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]


@blueprint.get("/<job_id>/events")
@described(
    query={"starting_after": _NUMBER},
    headers={"Last-Event-ID": _NUMBER},
    answers={200: Stream("text/event-stream", "Events, numbered from 1."), 204: ()},
)
def stream(job_id: str) -> Response:
    """The events behind Last-Event-ID or ?starting_after, then those to come; 204 when there will be none."""
    if request.method == "HEAD":
        raise MethodNotAllowed(["GET"])
    own = services()
    after = _resume_point()
    with own.database.autocommit() as session:
        job = jobs.find(session, tenant().id, checked_id("job", job_id), with_output=False)
        if Status(job.status).is_terminal and events.last_number(session, job_id) <= after:
            return Response(status=204, content_type="text/event-stream")
    leave = own.streams.enter()
    answer = Response(_blocks(own, job_id, after), content_type="text/event-stream; charset=utf-8")
    answer.call_on_close(leave)  # called also when the client was gone before the first block
    answer.headers["Cache-Control"] = "no-store"
    answer.headers["X-Accel-Buffering"] = "no"
    return answer


def _resume_point() -> int:
    """The last event number that the client has; the header wins, because a browser reconnects with the same query."""
    for name, value in (
        ("Last-Event-ID", request.headers.get("Last-Event-ID")),
        ("starting_after", request.args.get("starting_after")),
    ):
        if value:
            if not re.fullmatch(r"[0-9]{1,18}", value) or int(value) > _MAX_NUMBER:
                raise InvalidRequest(f"{name} must be an event number", param=name)
            return int(value)
    return 0


def _blocks(own: Services, job_id: str, after: int) -> Iterator[bytes]:
    """The stream's bytes. It ends without a terminal event where we cannot go on: clients then resume."""
    yield b""  # sends the headers, so that a client knows that it is connected before the first event
    try:
        for event in events.follow(own.database, own.hub, job_id, after, heartbeat_s=own.settings.sse_heartbeat_s):
            yield _HEARTBEAT if event is None else block(event)
    except DATABASE_AWAY as error:
        logger.warning("the stream of %s ended early: %s", job_id, type(error).__name__)


def block(event: Event) -> bytes:
    """An event on the wire; its JSON is ASCII, so that no text in it can break a line.

    Keys are sorted, because a row has them in an order of its own: live and replayed events are the same bytes.
    """
    return f"id: {event.number}\nevent: {event.kind}\ndata: {json.dumps(event.data, sort_keys=True)}\n\n".encode()
