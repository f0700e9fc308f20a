"""One webhook, posted: to an address that was checked, in bounded time, with a bounded reply.

The host is resolved once for each attempt. If one of its addresses may not receive webhooks, nothing is sent; else
the connection goes to one of those very addresses, and asks for the name in Host, SNI and certificate. So a name whose
second answer is another one gains nothing. There is nothing here that follows a redirect, decodes a body, or reads
proxies and credentials from the environment.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import ipaddress
import queue
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Self

import certifi

from app import signatures
from app.addresses import Place, check_url, may_receive, place_of
from app.deliveries import Outcome, Outgoing
from app.errors import InvalidRequest
from app.settings import Settings

CONNECT_TIMEOUT_S = 5.0
"""For each address; there are a few at most."""
MAX_ADDRESSES = 3
"""Addresses of a host that are tried, one after the other."""
MAX_REPLY_BYTES = 65_536
"""A reply is read to here, so that the receiver sees its answer taken, and is then thrown away."""
_CHUNK_BYTES = 8_192
_HEADERS = {
    "Content-Type": "application/json",
    "User-Agent": "everbatch-webhooks",
    "Accept-Encoding": "identity",
    "Connection": "close",
}


def post(outgoing: Outgoing, delivery_id: str, settings: Settings) -> Outcome:
    """One attempt, in at most settings.webhook_timeout_s.

    The same id and body each time, a fresh timestamp.
    """
    headers = signatures.sign(outgoing.secrets, delivery_id, int(time.time()), outgoing.body) | _HEADERS
    with Deadline(settings.webhook_timeout_s) as deadline:
        try:
            check_url(outgoing.url, settings)  # the operator may have become stricter since
            place = place_of(outgoing.url)
            addresses = _allowed(resolve(place.host, place.port, deadline), settings)
            with contextlib.closing(_Connection(place, addresses, deadline)) as connection:
                connection.request("POST", place.path, outgoing.body.encode(), headers | {"Host": place.authority})
                reply = connection.getresponse()
                if deadline.has_passed:
                    raise TimeoutError  # headers that were cut off look like complete ones
                _read_away(reply, deadline)
        except (InvalidRequest, _Refused) as refusal:
            return Outcome(error=str(refusal))
        except (OSError, http.client.HTTPException) as error:
            return Outcome(error="there was no answer in time" if deadline.has_passed else _reason(error))
    return Outcome(status=reply.status, retry_after_s=_retry_after_s(reply.headers.get("Retry-After")))


class _Refused(Exception):
    """The host has an address that webhooks may not go to."""


class _NoConnection(TimeoutError):
    """Nobody took the connection in time."""


_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (socket.gaierror, "the host has no address"),
    (ssl.SSLError, "the receiver's certificate or TLS was refused"),
    (_NoConnection, "there was no connection in time"),
    (TimeoutError, "there was no answer in time"),
    (ConnectionError, "the connection failed"),
    (http.client.HTTPException, "the answer was not HTTP"),
)


def _reason(error: Exception) -> str:
    """In general words: an exact one would tell a tenant about addresses and ports inside."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "the connection failed")


def _retry_after_s(header: str | None) -> float | None:
    """Seconds of a Retry-After header, which is a number or a date; None for anything else."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        moment = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, moment.timestamp() - time.time())


def _read_away(reply: http.client.HTTPResponse, deadline: Deadline) -> None:
    """Read the reply's body up to MAX_REPLY_BYTES. Its status is known, so that nothing here can fail the attempt."""
    size = 0
    with contextlib.suppress(http.client.HTTPException, OSError, ValueError):
        while size < MAX_REPLY_BYTES and not deadline.has_passed:
            piece = reply.read1(_CHUNK_BYTES)
            if not piece:
                return
            size += len(piece)


# ---- where to


def resolve(host: str, port: int, deadline: Deadline) -> Sequence[str]:
    """All addresses of a host. Raises OSError, TimeoutError when there is no answer before the deadline.

    A resolver takes its own time and cannot be stopped, so it is asked on a thread, which may outlive the attempt.
    """
    answers: queue.SimpleQueue[Sequence[str] | OSError | UnicodeError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers.put(list(dict.fromkeys(str(each[4][0]) for each in found)))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=ask, name="resolver", daemon=True).start()
    try:
        answer = answers.get(timeout=deadline.left_s)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, OSError):
        raise answer
    if isinstance(answer, UnicodeError) or not answer:
        raise socket.gaierror(socket.EAI_NONAME, "no address")
    return answer


def _allowed(addresses: Sequence[str], settings: Settings) -> Sequence[str]:
    """The addresses, if webhooks may go to every one. Raises _Refused."""
    if not all(may_receive(ipaddress.ip_address(address), settings) for address in addresses):
        raise _Refused("the host has an address that is not public")
    return addresses[:MAX_ADDRESSES]


# ---- the connection


class Deadline:
    """Ends an attempt's connection when its time is over: a socket's timeout is per read, and a receiver may drip."""

    def __init__(self, seconds: float) -> None:
        self.has_passed = False
        self._ends_at = time.monotonic() + seconds
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    @property
    def left_s(self) -> float:
        """Seconds until then, at least a thousandth."""
        return max(0.001, self._ends_at - time.monotonic())

    def watch(self, connected: socket.socket) -> None:
        with self._lock:
            self._sockets.append(connected)
            if self.has_passed:
                _shut(connected)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        with self._lock:
            self.has_passed = True
            for connected in self._sockets:
                _shut(connected)


def _shut(connected: socket.socket) -> None:
    """Shut the plain socket even below TLS, so that a read that waits on it ends; SSLSocket's own way would race it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


class _Connection(http.client.HTTPConnection):
    """A connection to one of the checked addresses of a place, under the attempt's deadline."""

    def __init__(self, place: Place, addresses: Sequence[str], deadline: Deadline) -> None:
        super().__init__(place.host, place.port, timeout=deadline.left_s)
        self._place = place
        self._addresses = addresses
        self._deadline = deadline

    def connect(self) -> None:
        plain = self._reach()
        self._deadline.watch(plain)
        plain.settimeout(self._deadline.left_s)
        if self._place.scheme == "http":
            self.sock = plain
            return
        try:
            self.sock = tls_context().wrap_socket(plain, server_hostname=self._place.host)
        except BaseException:
            plain.close()
            raise
        self._deadline.watch(self.sock)

    def _reach(self) -> socket.socket:
        """Connect to the first address that answers."""
        last: OSError = _NoConnection()
        for address in self._addresses:
            if self._deadline.has_passed:
                break
            try:
                return _dial(address, self._place.port, min(CONNECT_TIMEOUT_S, self._deadline.left_s))
            except TimeoutError:
                last = _NoConnection()
            except OSError as error:
                last = error
        raise last


def _dial(address: str, port: int, timeout_s: float) -> socket.socket:
    """A connection to an address: socket.create_connection would ask the resolver once more."""
    plain = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        plain.settimeout(timeout_s)
        plain.connect((address, port))
    except BaseException:
        plain.close()
        raise
    return plain


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Certificates are checked against Mozilla's authorities, and must name the host."""
    return ssl.create_default_context(cafile=certifi.where())
