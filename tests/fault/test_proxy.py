"""The proxy does to connections what its methods say."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.fault.proxy import Proxy


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with suppress(ConnectionResetError):
            while piece := self.request.recv(1024):
                self.request.sendall(piece)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxy = Proxy(server.server_address[1])
        yield proxy
        proxy.close()
        server.shutdown()


def connected(proxy: Proxy) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", proxy.port), timeout=5)
    assert said(client, b"hello") == b"hello"
    return client


def said(client: socket.socket, words: bytes) -> bytes:
    client.sendall(words)
    return client.recv(1024)


def test_cut_resets_what_is_open_and_lets_new_ones_through(proxy: Proxy) -> None:
    with connected(proxy) as client:
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(1024)
    connected(proxy).close()


@pytest.mark.parametrize("forget", [False, True])
def test_what_is_swallowed_arrives_late_or_never(proxy: Proxy, forget: bool) -> None:
    with connected(proxy) as client:
        proxy.swallow()
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            said(client, b"late")
        client.settimeout(5)
        proxy.heal(forget=forget)
        if forget:
            with pytest.raises(ConnectionResetError):
                client.recv(1024)
        else:
            assert client.recv(1024) == b"late"


def test_a_new_connection_is_swallowed_too(proxy: Proxy) -> None:
    proxy.swallow()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=0.2) as client:
        with pytest.raises(TimeoutError):
            said(client, b"hello")
        client.settimeout(5)
        proxy.heal()
        assert client.recv(1024) == b"hello"


def test_a_half_closed_connection_says_that_nothing_more_comes(proxy: Proxy) -> None:
    with connected(proxy) as client:
        proxy.half_close()
        assert client.recv(1024) == b""
        client.sendall(b"still heard")


def test_delay_holds_every_piece(proxy: Proxy) -> None:
    with connected(proxy) as client:
        proxy.delay(0.3)
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            said(client, b"slow")
        client.settimeout(5)
        assert client.recv(1024) == b"slow"
