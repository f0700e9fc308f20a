"""The API as a process: how it starts and how it stops."""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest

from app.children import wait_until
from app.settings import Settings

SO_ATTACH_FILTER = 26


def test_a_stop_ends_open_streams_in_good_order(serving: Any, settings: Settings, submit: Any, owner: Any) -> None:
    with serving(settings) as server, httpx.Client(trust_env=False) as client:
        url = f"{server.url}/v1/jobs/{submit()}/events"
        with client.stream("GET", url, headers={"Authorization": f"Bearer {owner.key}"}, timeout=20) as answer:
            pieces = answer.iter_bytes()
            assert next(pieces).startswith(b"id: 1\n")
            server.process.send_signal(signal.SIGTERM)
            assert b"".join(pieces) == b""  # not cut off: httpx would raise
        assert server.process.wait(20) == 0  # well before the graceful timeout of 30 s


def test_a_client_that_lost_its_power_is_noticed(server: Any, submit: Any, owner: Any) -> None:
    with following(server, submit(), owner) as client:
        assert wait_until(lambda: open_streams(server) == 1, 10)
        drop_all_that_comes(client)
        # Two heartbeats are 0.4 s; the kernel by itself waits for minutes.
        assert wait_until(lambda: open_streams(server) == 0, 10)


def test_clients_that_go_leave_nothing_behind(serving: Any, settings: Settings, submit: Any, owner: Any) -> None:
    with serving(settings.model_copy(update={"sse_heartbeat_s": 0.5})) as server, ExitStack() as stack:
        (process,) = psutil.Process(server.process.pid).children()
        is_up = wait_until(lambda: httpx.get(f"{server.url}/readyz", trust_env=False).status_code in (200, 503), 10)
        before = process.num_fds()
        clients = [stack.enter_context(following(server, submit(), owner)) for _ in range(120)]
        assert is_up and wait_until(lambda: open_streams(server) == 120, 30)
        assert process.num_fds() < before + 150, "a connection to Redis or Postgres for each stream"
        for client in clients[:80]:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()  # a reset
        for client in clients[80:]:
            drop_all_that_comes(client)
        assert wait_until(lambda: open_streams(server) == 0, 10)
        assert wait_until(lambda: process.num_fds() <= before + 20, 10), process.net_connections()


def following(server: Any, job_id: str, owner: Any) -> socket.socket:
    """A client that has begun to follow a job."""
    host, port = "127.0.0.1", int(server.url.rsplit(":", 1)[1])
    head = f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {owner.key}\r\n\r\n"
    client = socket.create_connection((host, port), timeout=20)
    client.sendall(head.encode())
    assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")
    return client


def drop_all_that_comes(connection: socket.socket) -> None:
    """From here on nothing is acknowledged, as after a cut cable: a packet filter that keeps no byte."""
    keep_nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(keep_nothing))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def open_streams(server: Any) -> float:
    """As the server's metrics tell."""
    text = httpx.get(metrics_url(server), trust_env=False).text
    (line,) = [line for line in text.splitlines() if line.startswith("everbatch_open_streams ")]
    return float(line.split()[1])


def metrics_url(server: Any) -> str:
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line["logger"] == "app.metrics"]
    assert (line["role"], line["level"]) == ("api", "info")
    return f"http://127.0.0.1:{line['message'].rsplit(':', 1)[1].split('/')[0]}/metrics"


def test_it_serves_also_when_loaded_before_the_fork(serving: Any, settings: Settings, owner: Any) -> None:
    """And with gunicorn's own worker: nothing but the quick end of streams, and of slow clients, depends on ours."""
    with serving(settings, "--preload", "--worker-class", "gthread") as server:
        headers = {"Authorization": f"Bearer {owner.key}"}
        answer = httpx.post(f"{server.url}/v1/jobs", json={"prompt": "hi"}, headers=headers, trust_env=False)
        assert answer.status_code == 202
        url = f"{server.url}{answer.headers['Location']}"
        assert httpx.post(f"{url}/cancel", headers=headers, trust_env=False).json()["status"] == "cancelled"
        assert httpx.get(f"{url}/events", headers=headers, trust_env=False).text.endswith("\n\n")


def test_a_large_body_is_refused_while_it_comes(server: Any, owner: Any) -> None:
    def pieces() -> Any:
        for _ in range(100):
            yield b"x" * 100_000

    headers = {"Authorization": f"Bearer {owner.key}"}
    answer = httpx.post(f"{server.url}/v1/jobs", content=pieces(), headers=headers, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


HALF = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
WHOLE = HALF + b"\r\n"


def connect(server: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20)


def is_healthy(server: Any) -> bool:
    return httpx.get(f"{server.url}/healthz", trust_env=False, timeout=5).status_code == 200


def answers(connection: socket.socket, number: int) -> bool:
    """Whether so many answers of /healthz come, one behind the other."""
    seen = b""
    while seen.count(b"HTTP/1.1 200 ") < number or not seen.endswith(b"}\n"):
        if not (piece := connection.recv(65_536)):
            return False
        seen += piece
    return True


@pytest.fixture
def connections(server: Any) -> Iterator[Callable[[int], list[socket.socket]]]:
    """Opens connections to the server."""
    with ExitStack() as opened:
        yield lambda number: [opened.enter_context(connect(server)) for _ in range(number)]


def test_half_requests_hold_no_thread_and_end_in_time_even_one_that_trickles(server: Any, connections: Any) -> None:
    silent, half, second = connections(40), connections(40), connections(40)  # the server has 34 threads
    (trickling,) = connections(1)
    trickling.sendall(HALF + b"X: ")
    with ThreadPoolExecutor(1) as beside:
        ended = beside.submit(trickle, trickling)
        for connection in half:
            connection.sendall(HALF)
        for connection in second:
            connection.sendall(WHOLE + HALF)
        assert all(answers(connection, 1) for connection in second)
        assert is_healthy(server)
        assert [connection.recv(1) for connection in silent + half + second] == [b""] * 120  # within their 20 s
        assert ended.result(), "10 s are what a head may take in all"


def trickle(connection: socket.socket) -> bool:
    """Send byte by byte for 20 s; whether the connection was ended meanwhile."""
    for _ in range(40):
        try:
            connection.sendall(b"x")
        except OSError:
            return True
        threading.Event().wait(0.5)
    return False


def test_a_head_in_pieces_and_two_requests_at_once_are_answered(connections: Any) -> None:
    (connection,) = connections(1)
    for piece in (HALF[:9], HALF[9:], b"\r", b"\n" + WHOLE + HALF):
        connection.sendall(piece)
        threading.Event().wait(0.05)
    assert answers(connection, 2)
    connection.sendall(b"\r\n")
    assert answers(connection, 1)


LARGE = b'{"prompt":"' + b"x" * 1_100_000 + b'"}'
GOOD = b'{"prompt":"hi"}'


@pytest.mark.parametrize(
    ("key", "path", "content", "status", "is_kept"),
    [
        ("right", "/v1/jobs", GOOD, 202, True),
        ("right", "/v1/jobs", iter([GOOD[:5], GOOD[5:]]), 202, True),
        ("right", "/v1/jobs", b"{", 400, True),
        ("right", "/v1/jobs", LARGE, 413, False),
        ("right", "/v1/jobs", iter([LARGE, LARGE]), 413, False),
        ("wrong", "/v1/jobs", b"", 401, True),
        ("wrong", "/v1/jobs", GOOD, 401, False),
        ("wrong", "/v1/jobs", iter([GOOD]), 401, False),
        ("wrong", "/nowhere", GOOD, 404, False),
    ],
)
def test_an_answer_says_whether_its_connection_goes_on(
    server: Any, owner: Any, key: str, path: str, content: Any, status: int, is_kept: bool
) -> None:
    headers = {"Authorization": f"Bearer {owner.key if key == 'right' else key}"}
    with httpx.Client(base_url=server.url, headers=headers, trust_env=False) as client:
        answer = client.post(path, content=content)
        assert (answer.status_code, answer.headers["Connection"]) == (status, "keep-alive" if is_kept else "close")
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_upload_keeps_its_connection(server: Any, owner: Any, is_chunked: bool) -> None:
    form = httpx.Request("POST", "http://x/", data={"purpose": "batch"}, files={"file": ("a", b"x" * 100_000)})
    content = form.read()
    headers = {"Authorization": f"Bearer {owner.key}", "Content-Type": form.headers["Content-Type"]}
    sent: Any = iter([content[:70_000], content[70_000:]]) if is_chunked else content
    answer = httpx.post(f"{server.url}/v1/files", content=sent, headers=headers, trust_env=False)
    assert (answer.status_code, answer.headers["Connection"]) == (200, "keep-alive")


def test_a_head_without_an_end_is_refused(connections: Any) -> None:
    (connection,) = connections(1)
    connection.sendall(HALF + b"X: " + b"x" * 70_000)
    assert connection.recv(65_536).startswith(b"HTTP/1.1 431 ")


def test_clients_that_do_not_close_hold_up_nobody(server: Any, connections: Any) -> None:
    for connection in connections(20):
        connection.sendall(HALF + b"Connection: close\r\n\r\n")
        assert answers(connection, 1)
    assert is_healthy(server)


def test_too_many_half_requests_close_the_oldest(serving: Any, settings: Settings) -> None:
    with (
        serving(settings.model_copy(update={"api_threads": 8}), "--worker-connections", "20") as server,
        ExitStack() as opened,
    ):
        half = []
        for _ in range(14):
            half.append(opened.enter_context(connect(server)))
            half[-1].sendall(HALF)
        assert [connection.recv(1) for connection in half[:4]] == [b""] * 4
        assert is_healthy(server)  # the 15th
        for connection in half[5:]:
            connection.sendall(b"\r\n")
            assert answers(connection, 1)


@pytest.mark.slow  # it waits for the 30 s that a body may pause
def test_a_body_that_stops_is_refused(connections: Any, owner: Any) -> None:
    moving, stopped = connections(2)
    for connection in (moving, stopped):
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {owner.key}\r\nContent-Length: 15\r\n\r\n"
        connection.sendall(head.encode())
    for byte in b'{"prompt":"ab"}':
        moving.sendall(bytes([byte]))
        threading.Event().wait(2.5)
    assert moving.recv(65_536).startswith(b"HTTP/1.1 202 ")
    assert stopped.recv(65_536).startswith(b"HTTP/1.1 400 ")


def test_a_model_that_cannot_be_served_ends_the_start_with_one_line(serving: Any, settings: Settings) -> None:
    with serving(settings.model_copy(update={"model": "/nowhere"})) as server:
        assert server.process.wait(20) != 0
        log = server.log.read_text()
    assert "EVERBATCH_MODEL: '/nowhere' has no readable config.json" in log
    assert "Traceback" not in log


BROKEN = [
    (b"GET /" + b"x" * 16_000 + b" HTTP/1.1\r\n\r\n", 414),
    (b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"x" * 100_000 + b"\r\n\r\n", 431),
    (b"nonsense\r\n\r\n", 400),
    (b"GET /healthz HTTP/9.9\r\nHost: x\r\n\r\n", 400),
    (b"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer SECRET\0\r\n\r\n", 400),
    (
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nAuthorization: Bearer {key}\r\n\r\nXX\r\n",
        400,
    ),
]


@pytest.mark.parametrize(("sent", "status"), BROKEN)
def test_broken_http_is_refused_in_json_and_never_logged(server: Any, owner: Any, sent: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=10) as connection:
        connection.sendall(sent.replace(b"{key}", owner.key.encode()))
        answer = b""
        while not answer.partition(b"\r\n\r\n")[2]:
            answer += (piece := connection.recv(65_536))
            assert piece, "the connection was closed without an answer"
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"application/problem+json" in head
    assert json.loads(body)["status"] == status
    assert "SECRET" not in server.log.read_text()


def test_the_log_is_json_and_names_the_metrics_port(server: Any) -> None:
    assert "everbatch_open_streams" in httpx.get(metrics_url(server), trust_env=False).text
