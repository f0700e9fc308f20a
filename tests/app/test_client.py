"""The client: events parsed strictly, streams resumed where they broke, errors in one line."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from app.children import free_port
from app.client import Broken, Client, Event, EventParser, Refused, Unreachable

_ONE = Event(1, "queued", {"status": "queued"})
_TWO = Event(2, "tokens", {"index": 0, "text": "a\u2028b 🦆"})
_TWO_LINES = 'id: 2\nevent: tokens\ndata: {"index": 0, "text": "a\u2028b 🦆"}\n\n'
_LOG = [
    _ONE,
    Event(2, "running", {"status": "running", "attempt": 1}),
    *[Event(number, "tokens", {"index": 0, "text": f" {number}"}) for number in range(3, 9)],
    Event(9, "succeeded", {"status": "succeeded"}),
]


def _block(event: Event) -> bytes:
    return f"id: {event.number}\nevent: {event.kind}\ndata: {json.dumps(event.data)}\n\n".encode()


_FIRST = _block(_ONE)


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (_FIRST, [_ONE]),
        (_FIRST.replace(b"\n", b"\r\n"), [_ONE]),
        (_FIRST.replace(b"\n", b"\r"), [_ONE]),
        (b"\xef\xbb\xbf" + _FIRST, [_ONE]),
        (_FIRST.replace(b": ", b":"), [_ONE]),
        (_FIRST + _TWO_LINES.encode(), [_ONE, _TWO]),
        (b": hb\n" + _FIRST + b": hb\n: hb\n" + _TWO_LINES.encode(), [_ONE, _TWO]),
        (_FIRST + b": hb\n\n\n" + _TWO_LINES.encode(), [_ONE, _TWO]),
        (b"retry: 3000\n\nid: 7\n\nevent: ping\n\n" + _FIRST, [_ONE]),
        (b'id: 1\nevent: queued\nunknown: x\ndata: {"status":\ndata: "queued"}\n\n', [_ONE]),
        (_FIRST + _TWO_LINES.encode()[:-1], [_ONE]),  # cut before the blank line: the event did not arrive
        (_FIRST + _TWO_LINES.encode()[:20], [_ONE]),
        (b"", []),
    ],
)
def test_parser_finds_the_same_events_wherever_the_bytes_are_cut(stream: bytes, events: list[Event]) -> None:
    for size in (1, 2, 3, 7, len(stream) or 1):
        parser = EventParser()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [event for piece in pieces for event in parser.feed(piece)] == events, size


@pytest.mark.parametrize(
    "block",
    [
        b"event: tokens\ndata: {}\n\n",
        b"id: x\nevent: tokens\ndata: {}\n\n",
        b"id: 1\ndata: {}\n\n",
        b"id: 1\nevent: tokens\ndata: [1]\n\n",
        b'id: 1\nevent: tokens\ndata: {"text"\n\n',
        b"id: 1\nevent: tokens\ndata:\n\n",
        b'id: 1\nevent: tokens\ndata: {"text": "\xff"}\n\n',
    ],
)
def test_parser_refuses_what_is_no_event_of_a_job(block: bytes) -> None:
    with pytest.raises(Broken):
        EventParser().feed(block)


Answer = Callable[[BaseHTTPRequestHandler], None]


class _Script:
    """A real HTTP server that gives one answer after the other, then none, and remembers what it was asked."""

    def __init__(self, answers: list[Answer]) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        remaining, requests = iter(answers), self.requests

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
                self.close_connection = True
                next(remaining, _no_answer)(self)

            do_POST = do_GET  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def asked(self, header: str) -> list[str | None]:
        return [headers.get(header) for _, headers, _ in self.requests]


@contextmanager
def _script(*answers: Answer) -> Iterator[tuple[_Script, Client]]:
    script = _Script(list(answers))
    thread = threading.Thread(target=script.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with Client(script.url, "eb_key", first_pause_s=0.001) as client:
            yield script, client
    finally:
        script.server.shutdown()
        script.server.server_close()
        thread.join()


def _events(events: list[Event], *, cut: int = 0, ends: bool = False) -> Answer:
    """A stream of these events and a piece of the next; then it ends, or the connection breaks in a chunk."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for event in events:
            _chunk(handler, _block(event))
        if cut:
            _chunk(handler, _block(_LOG[events[-1].number])[:cut])
        if ends:
            handler.wfile.write(b"0\r\n\r\n")

    return answer


def _chunk(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    handler.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


def _reply(status: int, body: object = None, *, text: str | None = None, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        content = b"" if status == 204 else (json.dumps(body) if text is None else text).encode()
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        if status != 204:
            handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def _no_answer(handler: BaseHTTPRequestHandler) -> None:
    """The connection closes without a word."""


def _problem(message: str, param: str | None = None) -> dict[str, Any]:
    return {"status": 422, "error": {"message": message, "type": "x", "param": param, "code": "invalid_request"}}


@pytest.mark.parametrize("cut", [0, 1, 5, 20])
def test_broken_stream_is_resumed_behind_its_last_whole_event(cut: int) -> None:
    with (
        _script(
            _events(_LOG[:2], cut=cut),
            _events(_LOG[2:5], cut=cut),
            _no_answer,
            _reply(503, _problem("busy"), Retry_After="0"),
            _events(_LOG[5:7], ends=True),  # an API that stops ends its streams in good order
            _events(_LOG[7:], ends=True),
        ) as (script, client)
    ):
        assert list(client.events("job_1")) == _LOG
        assert script.asked("last-event-id") == [None, "2", "5", "5", "5", "7"]
        assert script.asked("authorization") == ["Bearer eb_key"] * 6


def test_events_start_behind_a_given_number_and_end_where_nothing_will_come() -> None:
    with _script(_events(_LOG[6:], ends=True), _reply(204)) as (script, client):
        assert list(client.events("job_1", after=6)) == _LOG[6:]
        assert list(client.events("job_1", after=9)) == []
        assert script.asked("last-event-id") == ["6", "9"]


def test_stream_gives_up_after_ten_tries_without_an_event() -> None:
    with _script(_events(_LOG[:2]), *[_no_answer] * 10) as (script, client):
        seen = []
        with pytest.raises(Unreachable):
            seen.extend(client.events("job_1"))
        assert len(script.requests) == 11


@pytest.mark.parametrize("wrong", [[_LOG[0], _LOG[2]], [_LOG[0], _LOG[0]]], ids=["gap", "repeat"])
def test_gap_or_repeat_in_the_numbers_is_an_error(wrong: list[Event]) -> None:
    with _script(_events(wrong)) as (_, client), pytest.raises(Broken, match="after event 1"):
        list(client.events("job_1"))


def test_refused_stream_is_not_asked_for_again() -> None:
    with _script(_reply(404, _problem("There is no job 'job_1'", "id"))) as (_, client):
        with pytest.raises(Refused) as refused:
            list(client.events("job_1"))
        assert refused.value.status == 404


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (_reply(422, _problem("top_p: input should be less than 1", "top_p")), "top_p: input should be less than 1"),
        (_reply(422, _problem("Input should be positive", "max_tokens")), "max_tokens: Input should be positive"),
        (_reply(401, _problem("No valid API key was given")), "No valid API key was given"),
        (_reply(502, text="<html>Bad Gateway</html>"), "http://127.0.0.1:PORT/v1/jobs/job_1 answered 502"),
        (_reply(200, text="<html>Welcome</html>"), "did not answer with a JSON object"),
        (_reply(200, []), "did not answer with a JSON object"),
        (_no_answer, "The connection to http://127.0.0.1:PORT broke"),
    ],
)
def test_error_is_the_servers_sentence_and_field_in_one_line(answer: Answer, line: str) -> None:
    with _script(answer) as (script, client):
        with pytest.raises((Refused, Broken, Unreachable)) as error:
            client.get("job_1")
        said = str(error.value)
        assert line in said.replace(str(script.server.server_port), "PORT")
        assert "\n" not in said


def test_closed_port_is_named_with_the_way_to_start_a_service() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with Client(url, "eb_key") as client, pytest.raises(Unreachable, match=f"{url}.*everbatch up"):
        client.submit("x")


@pytest.mark.parametrize("url", ["no address", "127.0.0.1:8000", "http://", "http://[", "http://\ud800"])
def test_wrong_address_is_named(url: str) -> None:
    with pytest.raises(Unreachable), Client(url, "eb_key") as client:
        client.get("job_1")


def test_submission_whose_answer_was_lost_is_sent_again_under_the_same_key() -> None:
    with _script(_no_answer, _reply(202, {"id": "job_1"})) as (script, client):
        assert client.submit("x", max_tokens=3)["id"] == "job_1"
        (_, first, body), (_, second, again) = script.requests
        assert first["idempotency-key"] == second["idempotency-key"]
        assert json.loads(body) == json.loads(again) == {"prompt": "x", "max_tokens": 3}


def test_question_whose_answer_was_lost_is_asked_again() -> None:
    with _script(_no_answer, _reply(200, {"id": "job_1"})) as (script, client):
        assert client.get("job_1")["id"] == "job_1"
        assert len(script.requests) == 2


def test_what_would_do_more_when_it_is_asked_twice_is_asked_once() -> None:
    with _script(_no_answer, _reply(200, {})) as (script, client), pytest.raises(Unreachable):
        client.create_batch("file_1", endpoint="/v1/completions")
    assert len(script.requests) == 1


def test_jobs_are_listed_page_by_page() -> None:
    pages = [
        _reply(200, {"data": [{"id": "c"}, {"id": "b"}], "has_more": True, "first_id": "c", "last_id": "b"}),
        _reply(200, {"data": [{"id": "a"}], "has_more": False, "first_id": "a", "last_id": "a"}),
    ]
    with _script(*pages) as (script, client):
        assert [job["id"] for job in client.jobs(status="queued", page_size=2)] == ["c", "b", "a"]
        assert [path for path, _, _ in script.requests] == [
            "/v1/jobs?limit=2&status=queued",
            "/v1/jobs?limit=2&status=queued&after=b",
        ]


def test_broken_download_leaves_no_file(tmp_path: Path) -> None:
    def half(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.wfile.write(b"half")

    place = tmp_path / "out.jsonl"
    with _script(half, _reply(200, text="whole\n")) as (_, client):
        with pytest.raises(Unreachable):
            client.download("file_1", place)
        assert list(tmp_path.iterdir()) == []
        client.download("file_1", place)
        assert place.read_text() == "whole\n"


def test_batch_is_looked_at_until_it_has_ended() -> None:
    looks = [_reply(200, {"status": status}) for status in ("validating", "in_progress", "completed")]
    with _script(looks[0], _no_answer, looks[1], looks[2]) as (_, client):
        seen = [batch["status"] for batch in client.batch_progress("batch_1", every_s=0.001)]
        assert seen == ["validating", "in_progress", "completed"]
