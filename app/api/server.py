"""gunicorn's threaded worker, taught to end event streams when it stops, and to refuse broken HTTP in JSON.

gunicorn "app.api:create_app()" --worker-class app.api.server.Worker --threads 256
"""

from __future__ import annotations

import logging
import socket
import sys
from http import HTTPStatus
from typing import Any

from gunicorn import util
from gunicorn.arbiter import Arbiter
from gunicorn.http.errors import (
    ExpectationFailed,
    LimitRequestHeaders,
    LimitRequestLine,
    ParseException,
    UnsupportedTransferCoding,
)
from gunicorn.workers.gthread import ThreadWorker
from pydantic import ValidationError

from app import logs
from app.api import errors
from app.api.services import services_of
from app.errors import SetupError
from app.settings import complaint

logger = logging.getLogger(__name__)

_STATUSES: dict[type[Exception], HTTPStatus] = {
    LimitRequestLine: HTTPStatus.REQUEST_URI_TOO_LONG,
    LimitRequestHeaders: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    ExpectationFailed: HTTPStatus.EXPECTATION_FAILED,
    UnsupportedTransferCoding: HTTPStatus.NOT_IMPLEMENTED,
}
"""Of requests that HTTP itself refuses; all others are bad ones."""


class Worker(ThreadWorker):  # type: ignore[misc]
    """One API process. With gunicorn's own, streams hold up each stop for the whole graceful timeout and then break."""

    def load_wsgi(self) -> None:
        """Load the application and open its services, before the first request comes."""
        logs.setup("api")
        logs.adopt("gunicorn.error")
        try:
            super().load_wsgi()
            self._notice_lost_clients(services_of(self.wsgi).get().settings.sse_heartbeat_s)
        except (SetupError, OSError, ValidationError) as error:
            sys.stderr.write(f"{complaint(error)}\n")
            sys.exit(Arbiter.APP_LOAD_ERROR)  # tells gunicorn not to try again

    def _notice_lost_clients(self, heartbeat_s: float) -> None:
        """End a connection whose client acknowledges nothing for two heartbeats, such as one that lost its power.

        What a listening socket is told, those that it accepts inherit. The kernel alone waits for a quarter of an hour.
        """
        for listener in self.sockets:
            if listener.sock.family in (socket.AF_INET, socket.AF_INET6):
                timeout_ms = int(2000 * heartbeat_s)
                listener.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)

    def handle_exit(self, signal: int, frame: Any) -> None:
        """On SIGTERM: take no more requests, end the streams, finish what is short."""
        super().handle_exit(signal, frame)
        if self.booted:
            services_of(self.wsgi).get().end_streams()

    def handle_error(self, req: Any, client: Any, addr: Any, exc: Exception) -> None:
        """Answer what never reached the application, or broke outside it.

        What the request held is not logged: a key may be in it.
        """
        status = _STATUSES.get(type(exc), HTTPStatus.BAD_REQUEST)
        if not isinstance(exc, ParseException):
            status = HTTPStatus.INTERNAL_SERVER_ERROR
        logger.warning("a request broke: %s", type(exc).__name__, exc_info=exc if status >= 500 else None)
        body = errors.document(status, status.name.lower(), f"The request cannot be read: {status.phrase}")
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nConnection: close\r\nContent-Type: {errors.CONTENT_TYPE}\r\n"
        )
        try:
            util.write_nonblock(client, f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        except OSError as error:
            logger.info("an error was not told: %s", type(error).__name__)  # the client has gone
