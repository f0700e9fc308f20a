"""Server-sent events as OpenAI's clients read them: data alone, [DONE] at a good end, an error object at a bad one.

A heartbeat is a comment with one newline: an empty line behind it would be an event without data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flask import Response

from app import events
from app.api.errors import DATABASE_AWAY
from app.api.services import Services, services
from app.events import Event

logger = logging.getLogger(__name__)

HEARTBEAT = b": hb\n"
DONE = b"data: [DONE]\n\n"
CONTENT_TYPE = "text/event-stream; charset=utf-8"


def data(value: Mapping[str, Any], *, kind: str | None = None) -> bytes:
    """An event. Its JSON is ASCII, so that no text in it can break a line."""
    named = "" if kind is None else f"event: {kind}\n"
    return f"{named}data: {json.dumps(value)}\n\n".encode()


def error(message: str, *, code: str, kind: str = "server_error") -> bytes:
    """What ends a stream that cannot go on."""
    return data({"error": {"message": message, "type": kind, "param": None, "code": code}})


def streamed(
    job_id: str, show: Callable[[Event], Iterable[bytes]], *, on_leave: Callable[[], None] | None = None
) -> Response:
    """A stream of what each event of the job shows, from its first to its terminal one.

    on_leave is called when the client went before the end. Raises Unavailable beyond the limit of streams.
    """
    own = services()
    leave = own.streams.enter()
    stream = _Stream(own, job_id, show)
    answer = Response(stream.pieces(), content_type=CONTENT_TYPE)

    def close() -> None:
        leave()
        if on_leave is not None and not stream.is_over:
            on_leave()

    answer.call_on_close(close)  # called also when the client was gone before the first piece
    answer.headers["Cache-Control"] = "no-store"
    answer.headers["X-Accel-Buffering"] = "no"
    return answer


class _Stream:
    def __init__(self, own: Services, job_id: str, show: Callable[[Event], Iterable[bytes]]) -> None:
        self._own = own
        self._job_id = job_id
        self._show = show
        self.is_over = False
        """Whether we ended it, and not the client."""

    def pieces(self) -> Iterator[bytes]:
        yield b""  # sends the headers, so that a client knows that it is connected before the first event
        own = self._own
        try:
            heartbeat_s = own.settings.sse_heartbeat_s
            for event in events.follow(own.database, own.hub, self._job_id, 0, heartbeat_s=heartbeat_s):
                if event is None:
                    yield HEARTBEAT
                    continue
                self.is_over = event.ends_log
                yield from self._show(event)
            if not self.is_over:
                self.is_over = True
                yield error(f"The stream ends before its job: see /v1/jobs/{self._job_id}", code="stream_interrupted")
        except DATABASE_AWAY as away:
            logger.warning("the stream of %s ended early: %s", self._job_id, type(away).__name__)
            self.is_over = True
            yield error("The database does not answer at the moment", code="unavailable")
