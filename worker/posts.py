"""One webhook, posted: to an address that was checked, in bounded time."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from email.utils import parsedate_to_datetime
from typing import Any, Self

import requests
import urllib3.exceptions
from requests.adapters import HTTPAdapter
from requests_hardened import Config, HTTPSession
from requests_hardened.ip_filter import InvalidIPAddress
from requests_hardened.ip_filter_adapter import IPFilterAdapter

from app import signatures
from app.addresses import check_url, is_public
from app.deliveries import Outcome, Outgoing
from app.errors import InvalidRequest
from app.settings import Settings

CONNECT_TIMEOUT_S = 5.0
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
    """One attempt, in at most settings.webhook_timeout_s plus the time that the name takes to resolve.

    The same id and body each time, a fresh timestamp. No redirects; no proxies or credentials of the environment.
    """
    headers = signatures.sign(outgoing.secret, delivery_id, int(time.time()), outgoing.body) | _HEADERS
    with _Deadline(settings.webhook_timeout_s) as deadline:
        try:
            check_url(outgoing.url, settings)  # the operator may have become stricter since
            with _session(settings, deadline) as session:
                reply = session.post(outgoing.url, data=outgoing.body.encode(), headers=headers, stream=True)
                if deadline.has_passed:
                    raise requests.Timeout  # headers that were cut off look like complete ones
                _read_away(reply, deadline)
        except InvalidRequest as refusal:
            return Outcome(error=refusal.message)
        except (requests.RequestException, UnicodeError) as error:  # a name that no resolver can be asked for
            return Outcome(error="there was no answer in time" if deadline.has_passed else _reason(error))
    return Outcome(status=reply.status_code, retry_after_s=_retry_after_s(reply.headers.get("Retry-After")))


_REASONS = (
    (InvalidIPAddress, "the host has an address that is not public"),
    (requests.exceptions.SSLError, "the receiver's certificate or TLS was refused"),
    (requests.ConnectTimeout, "there was no connection in time"),
    (requests.Timeout, "there was no answer in time"),
    (requests.ConnectionError, "the connection failed"),
)


def _reason(error: Exception) -> str:
    """In general words: an exact one would tell a tenant about addresses and ports inside."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "the request could not be sent")


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


def _read_away(reply: requests.Response, deadline: _Deadline) -> None:
    """Read the reply's body up to MAX_REPLY_BYTES. Its status is known, so that nothing here can fail the attempt."""
    size = 0
    with contextlib.closing(reply), contextlib.suppress(urllib3.exceptions.HTTPError, OSError):
        while size < MAX_REPLY_BYTES and not deadline.has_passed:
            piece = reply.raw.read1(_CHUNK_BYTES)
            if not piece:
                return
            size += len(piece)


# ---- the connection


class _Deadline:
    """Ends an attempt's connection when its time is over: a socket's timeout is per read, and a receiver may drip."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.has_passed = False
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

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


class _WatchedAdapter(HTTPAdapter):
    """Puts each connection under the attempt's deadline."""

    def __init__(self, deadline: _Deadline, **options: bool) -> None:
        super().__init__(**options)
        self._deadline = deadline

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        make, watch = pool.ConnectionCls, self._deadline.watch

        def make_watched(*args: Any, **kwargs: Any) -> Any:
            connection = make(*args, **kwargs)
            connect = connection.connect

            def connect_and_watch() -> None:
                connect()
                watch(connection.sock)

            connection.connect = connect_and_watch
            return connection

        pool.ConnectionCls = make_watched
        return pool


class _PublicAdapter(_WatchedAdapter, IPFilterAdapter):  # type: ignore[misc]
    """Resolves the host once, refuses an address that is not public, and connects to that very address."""

    def build_connection_pool_key_attributes(self, *args: Any, **kwargs: Any) -> Any:
        host, pool = super().build_connection_pool_key_attributes(*args, **kwargs)
        if not is_public(ipaddress.ip_address(host["host"].strip("[]"))):
            raise InvalidIPAddress
        return host, pool


def _session(settings: Settings, deadline: _Deadline) -> HTTPSession:
    session = HTTPSession(
        Config(
            ip_filter_enable=False,  # the adapters below filter, and more strictly
            ip_filter_allow_loopback_ips=False,
            never_redirect=True,
            default_timeout=(min(CONNECT_TIMEOUT_S, deadline.seconds), deadline.seconds),
        )
    )
    session.trust_env = False
    for scheme in ("https", "http"):
        adapter = (
            _WatchedAdapter(deadline)
            if settings.webhook_allow_private
            else _PublicAdapter(deadline, is_https_proto=scheme == "https")
        )
        session.mount(f"{scheme}://", adapter)
    return session
