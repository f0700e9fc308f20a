"""The client tries again by itself: one job is made, and what cannot help is not tried again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from given import GIVEN, NewClient

ASKED: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


class Proxy(ThreadingHTTPServer):
    """Forwards each request but the first, which it answers itself: 503."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Forwarder)
        self.tries: list[str | None] = []
        """x-stainless-retry-count of each request that came."""
        self.loses_the_answer = False
        """Whether also the first request is forwarded, and only its answer is lost."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Forwarder(BaseHTTPRequestHandler):
    server: Proxy

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tries.append(self.headers.get("x-stainless-retry-count"))
        is_first = len(self.server.tries) == 1
        if is_first and not self.server.loses_the_answer:
            self._answer(503, {}, b"")
            return
        there = urlsplit(GIVEN.url)
        connection = HTTPConnection(there.hostname or "", there.port, timeout=60)
        connection.request("POST", self.path, body, {name: self.headers[name] for name in self.headers})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if is_first and self.server.loses_the_answer:
            self._answer(503, {}, b"")
        else:
            self._answer(answer.status, dict(answer.getheaders()), content)

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()


def job_ids(client: Any) -> set[str]:
    return {job["id"] for job in client.get("/jobs?limit=100", cast_to=object)["data"]}


def test_a_request_that_did_not_arrive_is_sent_again(client: Any, new_client: NewClient, proxy: Proxy) -> None:
    before = job_ids(client)
    done = new_client(base_url=proxy.url, max_retries=2).chat.completions.create(**ASKED)
    assert proxy.tries == ["0", "1"]
    assert job_ids(client) - before == {f"job_{done.id.removeprefix('chatcmpl-')}"}


def test_a_lost_answer_is_given_again_under_the_same_key(client: Any, new_client: NewClient, proxy: Proxy) -> None:
    before = job_ids(client)
    proxy.loses_the_answer = True
    patient = new_client(base_url=proxy.url, max_retries=2)
    done = patient.responses.create(
        model="echo", input="x", max_output_tokens=4, extra_headers={"Idempotency-Key": proxy.url}
    )
    assert proxy.tries == ["0", "1"]
    assert job_ids(client) - before == {f"job_{done.id.removeprefix('resp_')}"}


def test_what_is_for_ever_is_not_tried_again(client: Any, new_client: NewClient, proxy: Proxy) -> None:
    proxy.tries.append(None)  # nothing is lost
    patient = new_client(base_url=proxy.url, max_retries=2)
    ended = client.responses.create(model="echo", input="x", max_output_tokens=1)
    with pytest.raises(openai.ConflictError):
        patient.responses.cancel(ended.id)
    with pytest.raises(openai.InternalServerError):
        patient.chat.completions.create(**ASKED | {"max_tokens": 4000}, extra_body={"deadline": 0.001})
    assert proxy.tries == [None, "0", "0"]
