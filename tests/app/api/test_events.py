"""Event streams over a real server: replay, follow, resume, heartbeats, limits."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

TEXTS = ("Once", " upon", " a\n\ntime", "\0", "\u2028", " …")
"""Stored as events 3 … 8; 1 is queued, 2 running, 9 succeeded."""


@dataclass(frozen=True)
class Listener:
    """Reads streams from the server with one key."""

    url: str
    key: str

    @contextmanager
    def open(self, job_id: str, *, last: str | None = None, query: str = "") -> Iterator[httpx.Response]:
        headers = {"Authorization": f"Bearer {self.key}"} | ({} if last is None else {"Last-Event-ID": last})
        url = f"{self.url}/v1/jobs/{job_id}/events{query}"
        with httpx.Client(trust_env=False) as client, client.stream("GET", url, headers=headers, timeout=20) as answer:
            yield answer

    @contextmanager
    def hold(self, job_id: str) -> Iterator[httpx.Response]:
        """An open stream. A client that left gives its place back at the next heartbeat, so it may take a few tries."""
        for _ in range(100):
            with self.open(job_id) as answer:
                if answer.status_code == 200:
                    yield answer
                    return
            threading.Event().wait(0.05)
        pytest.fail("no place became free")

    def read(self, job_id: str, **where: Any) -> list[tuple[int, str, Any]]:
        with self.open(job_id, **where) as answer:
            assert answer.status_code == 200, answer.read()
            return parse(b"".join(answer.iter_bytes()))


def parse(stream: bytes) -> list[tuple[int, str, Any]]:
    """(number, kind, data) of each block, after a check of its exact form."""
    blocks = stream.replace(b": hb\n", b"").split(b"\n\n")
    assert blocks.pop() == b""
    events = []
    for block in blocks:
        number, kind, data = (line.partition(b": ") for line in block.split(b"\n"))
        assert (number[0], kind[0], data[0]) == (b"id", b"event", b"data")
        assert data[2].isascii()
        events.append((int(number[2]), kind[2].decode(), json.loads(data[2])))
    return events


@pytest.fixture
def listener(server: Any, owner: Any) -> Listener:
    return Listener(server.url, owner.key)


@pytest.fixture
def told(submit: Any, worker: Any) -> str:
    """A job that has ended, with TEXTS as its output."""
    job_id: str = submit()
    worker.run(job_id, *TEXTS)
    return job_id


def test_the_stream_of_an_ended_job_is_its_whole_log(listener: Listener, told: str) -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 25, "total_tokens": 27}
    assert listener.read(told) == [
        (1, "queued", {"status": "queued"}),
        (2, "running", {"status": "running", "attempt": 1}),
        *[(3 + n, "tokens", {"index": 0, "text": text}) for n, text in enumerate(TEXTS)],
        (9, "succeeded", {"status": "succeeded", "finish_reason": "stop", "usage": usage, "error": None}),
    ]


@pytest.mark.parametrize("spelling", ["header", "query"])
def test_a_replay_from_any_number_is_the_rest_of_the_log(listener: Listener, told: str, spelling: str) -> None:
    whole = listener.read(told)
    for after in range(9):
        where = {"last": str(after)} if spelling == "header" else {"query": f"?starting_after={after}"}
        assert listener.read(told, **where) == whole[after:]


def test_the_header_wins_over_the_query(listener: Listener, told: str) -> None:
    assert [number for number, _, _ in listener.read(told, last="7", query="?starting_after=2")] == [8, 9]


@pytest.mark.parametrize("after", ["9", "10", "2147483647"])
def test_behind_the_end_of_the_log_there_is_nothing(listener: Listener, told: str, after: str) -> None:
    with listener.open(told, last=after) as answer:
        assert answer.status_code == 204


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "1e3", "٣", " ", "9" * 19, "%00", "2147483648"])
def test_a_number_that_is_none_is_refused_by_name(listener: Listener, told: str, value: str) -> None:
    with listener.open(told, query=f"?starting_after={value}") as answer:
        answer.read()
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "starting_after")


@pytest.mark.parametrize("last", ["-1", "2147483648", "999999999999999999"])
def test_a_wrong_header_is_refused_by_name(listener: Listener, submit: Any, last: str) -> None:
    with listener.open(submit(), last=last) as answer:
        answer.read()
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "Last-Event-ID")


def test_the_answer_is_neither_stored_nor_held_back(listener: Listener, told: str) -> None:
    with listener.open(told) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Accel-Buffering"] == "no"


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT"])
def test_streams_are_only_got(server: Any, owner: Any, told: str, method: str) -> None:
    headers = {"Authorization": f"Bearer {owner.key}"}
    answer = httpx.request(method, f"{server.url}/v1/jobs/{told}/events", headers=headers, trust_env=False)
    assert answer.status_code == 405


def test_a_follower_gets_each_event_as_it_comes(listener: Listener, submit: Any, worker: Any) -> None:
    job_id = submit()
    with listener.open(job_id) as answer:
        stream = Blocks(answer)
        assert stream.next()[1] == "queued"
        claim = worker.take(job_id)
        assert stream.next()[1] == "running"
        for number, text in enumerate(TEXTS, 3):
            worker.write(claim, text, number)
            assert stream.next() == (number, "tokens", {"index": 0, "text": text})
        worker.finish(claim)
        assert stream.next()[1] == "succeeded"
        assert stream.rest() == b""


def test_a_dropped_stream_resumes_without_gap_or_repeat(listener: Listener, submit: Any, worker: Any) -> None:
    job_id = submit()
    claim = worker.take(job_id)
    seen = []
    for number, text in enumerate(TEXTS, 3):
        worker.write(claim, text, number)
        with listener.open(job_id, last=str(len(seen))) as answer:  # left in the middle, again and again
            stream = Blocks(answer)
            while len(seen) < number:
                seen.append(stream.next())
    worker.finish(claim)
    seen += listener.read(job_id, last=str(len(seen)))
    assert [number for number, _, _ in seen] == list(range(1, 10))
    assert "".join(data["text"] for _, kind, data in seen if kind == "tokens") == "".join(TEXTS)


@pytest.mark.parametrize("last", ["50", "2147483647"])
def test_a_number_ahead_of_a_running_job_waits_for_its_end(
    listener: Listener, submit: Any, worker: Any, last: str
) -> None:
    job_id = submit()
    claim = worker.take(job_id)
    with listener.open(job_id, last=last) as answer:
        worker.write(claim, "unseen", 3)
        worker.finish(claim)
        assert parse(b"".join(answer.iter_bytes())) == []


def test_a_cancel_ends_the_stream(listener: Listener, call: Any, submit: Any) -> None:
    job_id = submit()
    with listener.open(job_id) as answer:
        stream = Blocks(answer)
        stream.next()
        call("POST", f"/v1/jobs/{job_id}/cancel")
        assert stream.next()[1] == "cancelled"
        assert stream.rest() == b""


def test_a_deleted_job_ends_the_stream(listener: Listener, call: Any, submit: Any) -> None:
    job_id = submit()
    with listener.open(job_id) as answer:
        stream = Blocks(answer)
        stream.next()
        call("DELETE", f"/v1/jobs/{job_id}")
        assert stream.next()[1] == "cancelled"
        assert stream.rest() == b""


def test_heartbeats_are_comments_with_one_newline(listener: Listener, submit: Any) -> None:
    with listener.open(submit(), last="1") as answer:
        beats = b""
        for piece in answer.iter_bytes():
            beats += piece
            if len(beats) >= 15:
                break
    assert beats == b": hb\n" * 3


def test_the_headers_come_before_the_first_event(listener: Listener, submit: Any, server: Any) -> None:
    """Without them a client could not tell a quiet stream from a server that hangs."""
    with listener.open(submit(), last="1") as answer:
        assert answer.status_code == 200


def test_streams_beyond_the_limit_are_refused_and_the_rest_is_served(
    listener: Listener, submit: Any, worker: Any, server: Any
) -> None:
    job_id = submit()
    with listener.open(job_id):
        pass  # it may still count when the next one comes
    with listener.hold(job_id), listener.hold(job_id):
        with listener.open(job_id) as answer:
            answer.read()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert httpx.get(f"{server.url}/healthz", trust_env=False).status_code == 200
    worker.run(job_id)
    # The places of clients that left come back at the next heartbeat.
    for _ in range(100):
        with listener.open(job_id) as answer:
            if answer.status_code == 200:
                assert parse(b"".join(answer.iter_bytes()))[-1][1] == "succeeded"
                return
        threading.Event().wait(0.05)
    pytest.fail("the places of streams that ended did not come back")


class Blocks:
    """Reads a stream block by block."""

    def __init__(self, answer: httpx.Response) -> None:
        self._pieces = answer.iter_bytes()
        self._buffer = b""

    def next(self) -> tuple[int, str, Any]:
        while True:
            self._buffer = self._buffer.replace(b": hb\n", b"")
            if b"\n\n" in self._buffer:
                block, self._buffer = self._buffer.split(b"\n\n", 1)
                return parse(block + b"\n\n")[0]
            self._buffer += next(self._pieces)

    def rest(self) -> bytes:
        return (self._buffer + b"".join(self._pieces)).replace(b": hb\n", b"")
