"""gunicorn's threaded worker, taught to end event streams when it stops, to refuse broken HTTP in JSON, and to have no
thread wait for a client that sends slowly, or that does not close.

A connection in its main loop, where it costs no thread:

    accepted ─▶ waits for its head ─▶ has a thread ─▶ is kept alive ─▶ waits for its next head …
                                                   └▶ waits for the client's close

gunicorn "app.api:create_app()" --worker-class app.api.server.Worker --threads 256
"""

from __future__ import annotations

import logging
import os
import re
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any

from gunicorn import util
from gunicorn.arbiter import Arbiter
from gunicorn.http.body import ChunkedReader
from gunicorn.http.errors import (
    ExpectationFailed,
    LimitRequestHeaders,
    LimitRequestLine,
    ParseException,
    UnsupportedTransferCoding,
)
from gunicorn.http.message import Request
from gunicorn.http.parser import RequestParser
from gunicorn.workers.gthread import TConn, ThreadWorker
from pydantic import ValidationError

from app import logs
from app.api import errors
from app.api.services import services_of
from app.errors import SetupError
from app.settings import complaint

logger = logging.getLogger(__name__)

_HEAD_S = 10.0
"""From its first moment, or its first byte where it was kept alive, a connection has so long to send a whole head."""
_READ_S = 30
"""A body may pause for so many seconds; how long it takes in all is not bounded."""
_LINGER_S = 2.0
"""How long a client may take to close what we have ended, before the rest of what it sends is refused."""
_MAX_HEAD_BYTES = 1 << 16
_PIECE_BYTES = 1 << 13
_END_OF_HEAD = re.compile(rb"\n\r?\n")
"""Also of heads that gunicorn refuses at the first look, for their bare LF."""

_STATUSES: dict[type[Exception], HTTPStatus] = {
    LimitRequestLine: HTTPStatus.REQUEST_URI_TOO_LONG,
    LimitRequestHeaders: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    ExpectationFailed: HTTPStatus.EXPECTATION_FAILED,
    UnsupportedTransferCoding: HTTPStatus.NOT_IMPLEMENTED,
}
"""Of requests that HTTP itself refuses; all others are bad ones."""


class _Request(Request):  # type: ignore[misc]
    def should_close(self) -> bool:
        """Also where the body was not read to its end, for the rest of it cannot be told from a request."""
        reader = self.body.reader
        is_read = reader.parser is None if isinstance(reader, ChunkedReader) else reader.length == 0
        return bool(super().should_close()) or not is_read


class _Parser(RequestParser):  # type: ignore[misc]
    mesg_class = _Request


class Worker(ThreadWorker):  # type: ignore[misc]
    """One API process. With gunicorn's own, streams hold up each stop for the whole graceful timeout and then break,
    half a request holds a thread for as long as its client likes, and a client that does not close holds up all others.
    """

    def load_wsgi(self) -> None:
        """Load the application and open its services, before the first request comes."""
        logs.setup("api")
        logs.adopt("gunicorn.error")
        try:
            super().load_wsgi()
            self._bound_waiting(services_of(self.wsgi).get().settings.sse_heartbeat_s)
        except (SetupError, OSError, ValidationError) as error:
            sys.stderr.write(f"{complaint(error)}\n")
            sys.exit(Arbiter.APP_LOAD_ERROR)  # tells gunicorn not to try again

    def _bound_waiting(self, heartbeat_s: float) -> None:
        """End a connection that stops in a body, or whose client acknowledges nothing for two heartbeats.

        The latter has lost its power, for instance, and the kernel alone waits for a quarter of an hour. What a
        listening socket is told, those that it accepts inherit. Of what we send only the kernel's wait is bounded.
        """
        for listener in self.sockets:
            listener.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", _READ_S, 0))
            if listener.sock.family in (socket.AF_INET, socket.AF_INET6):
                timeout_ms = int(2000 * heartbeat_s)
                listener.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)

    def enqueue_req(self, conn: TConn) -> None:
        """Give a connection a thread, which blocks while it reads, but not before the head of a request is there."""
        if conn.parser is None:
            conn.parser, conn.initialized = _Parser(self.cfg, conn.sock, conn.client), True
        if _END_OF_HEAD.search(_head(conn)):  # of a request that came together with the one before
            super().enqueue_req(conn)
        else:
            self._wait(conn, self._read_head, _HEAD_S)

    def _read_head(self, conn: TConn) -> None:
        piece = _received(conn)
        if piece is None:
            return
        buffer = conn.parser.unreader.buf
        buffer.seek(0, os.SEEK_END)
        buffer.write(piece)
        if _END_OF_HEAD.search(_head(conn)):
            self._stop_waiting(conn)
            super().enqueue_req(conn)
        elif not piece:
            self._drop(conn)
        elif len(_head(conn)) > _MAX_HEAD_BYTES:
            self._stop_waiting(conn)
            self.handle_error(None, conn.sock, conn.client, LimitRequestHeaders("the head is too large"))
            self._linger(conn)

    def finish_request(self, conn: TConn, future: Future[Any]) -> None:
        """Take a connection back from its thread. gunicorn's own stops the main loop until the client has closed."""
        if future.cancelled() or future.exception() or future.result():
            super().finish_request(conn, future)
        else:
            self._linger(conn)

    def _linger(self, conn: TConn) -> None:
        """Close a connection once its client did: to close while it still sends would take our answer from it."""
        try:
            conn.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._close(conn)
        else:
            self._wait(conn, self._pass_over, _LINGER_S)

    def _pass_over(self, conn: TConn) -> None:
        if _received(conn) == b"":
            self._drop(conn)

    def _wait(self, conn: TConn, go_on: Callable[[TConn], None], seconds: float) -> None:
        """Call go_on whenever the connection has something to read, for so long.

        No more than half of the connections that may be open wait at once: the oldest makes room.
        """

        def go_on_unless_dropped(_: socket.socket) -> None:
            if conn in self.pending_conns:  # not when another one's turn in this round has dropped it
                go_on(conn)

        conn.sock.setblocking(False)
        conn.timeout = time.monotonic() + seconds
        self.pending_conns.append(conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, go_on_unless_dropped)
        if len(self.pending_conns) > self.worker_connections // 2:
            self._drop(self.pending_conns[0])

    def _stop_waiting(self, conn: TConn) -> None:
        self.pending_conns.remove(conn)
        self.poller.unregister(conn.sock)

    def _drop(self, conn: TConn) -> None:
        self._stop_waiting(conn)
        self._close(conn)

    def _close(self, conn: TConn) -> None:
        self.nr_conns -= 1
        conn.close()

    def murder_pending(self) -> None:
        """Close the connections that have waited for too long; gunicorn calls this at least once in a second."""
        now = time.monotonic()
        for conn in [conn for conn in self.pending_conns if conn.timeout < now]:
            self._drop(conn)

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


def _head(conn: TConn) -> bytes:
    """What has come of a connection's next request."""
    head: bytes = conn.parser.unreader.buf.getvalue()
    return head


def _received(conn: TConn) -> bytes | None:
    """What a readable connection has to read: nothing once its client has gone, None where it has nothing after all."""
    try:
        piece: bytes = conn.sock.recv(_PIECE_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""
    return piece
