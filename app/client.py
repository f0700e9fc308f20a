"""A thin client of the REST API, for programs and for our own command line.

    from app.client import Client

    with Client("http://127.0.0.1:8000", key) as client:
        job = client.submit("Once upon a time", max_tokens=64)
        for event in client.events(job["id"]):
            if event.kind == "tokens":
                print(event.data["text"], end="", flush=True)

Objects are the server's own JSON; only events are parsed, because a stream has rules of its own.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NotRequired, Self, TypedDict, cast

import httpx

TERMINAL = frozenset({"succeeded", "failed", "cancelled", "expired"})
"""Kinds of the event that ends a job's log, which are also the statuses of an ended job."""
ENDED_BATCH = frozenset({"completed", "failed", "cancelled", "expired"})
"""Statuses of a batch that nothing follows."""

_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
_STREAM_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
"""A stream that says nothing for so long, heartbeats included, is dropped and opened again."""
_TRIES = 10
"""Connections in a row that bring nothing, before a loop gives up."""
_SENDINGS = 3
"""Of one request whose answer was lost on the way."""
_LONGEST_PAUSE_S = 5.0
_RETRYABLE = frozenset({429, 502, 503, 504})


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Likely(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Likely):
    top_logprobs: list[Likely]


class Logprobs(TypedDict):
    content: list[TokenLogprob]


class Choice(TypedDict):
    index: int
    text: str
    finish_reason: str | None
    logprobs: NotRequired[Logprobs]
    """Where the job asked for them, of a job that is read alone."""


class Output(TypedDict):
    choices: list[Choice]


class Problem(TypedDict):
    code: str
    message: str
    param: NotRequired[str]
    parent: NotRequired[str]
    """Which parent did not succeed, with the code parent_failed."""


class Job(TypedDict):
    id: str
    object: Literal["job"]
    status: str
    tier: str
    model: str
    attempt: int
    created_at: str
    started_at: str | None
    finished_at: str | None
    output: Output
    usage: Usage
    error: Problem | None
    metadata: dict[str, str]


class Counts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchProblem(TypedDict):
    code: str
    message: str
    line: NotRequired[int | None]


class BatchProblems(TypedDict):
    data: list[BatchProblem]


class Batch(TypedDict):
    """The fields that we use; the server sends OpenAI's whole object."""

    id: str
    status: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    request_counts: Counts
    errors: BatchProblems | None


class File(TypedDict):
    id: str
    bytes: int
    filename: str
    purpose: str


class Quote(TypedDict):
    """The place of another job's output, in a prompt or a content: see quote()."""

    quote: str


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str | Sequence[str | Quote]


class ClientError(Exception):
    """The service did not do what was asked; the message is one line."""


class Unreachable(ClientError):
    """No answer came from the address."""


class Broken(ClientError):
    """The answer was none that this API gives: something else listens there, or a proxy stands between."""


class Refused(ClientError):
    """The service answered with an error."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """field is the wrong field of the request, where it is one; retry_after_s what the server asks for."""
        self.status = status
        self.code = code
        self.field = field
        self.retry_after_s = retry_after_s
        # id is no field but the one of the path, which the message names.
        is_named = not field or field == "id" or field in message
        super().__init__(message if is_named else f"{field}: {message}")


@dataclass(frozen=True, slots=True)
class Event:
    """A fact about a job."""

    number: int
    kind: str
    """tokens, or the status that the job moved to."""
    data: dict[str, Any]

    @property
    def ends_log(self) -> bool:
        return self.kind in TERMINAL


def quote(job_id: str) -> Quote:
    """The place of a job's output: ["Summarize: ", quote(job_id)] is a prompt."""
    return {"quote": job_id}


class Client:
    """One connection pool to one service with one key. Safe to use from several threads."""

    def __init__(self, url: str, key: str, *, first_pause_s: float = 0.2) -> None:
        """first_pause_s is how long a dropped stream waits before it is opened again; it doubles up to 5 s."""
        self.url = url.rstrip("/")
        self._first_pause_s = first_pause_s
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"},
                timeout=_TIMEOUT,
                trust_env=not _is_loopback(self.url),  # a proxy of the environment does not know this machine
            )
        except (httpx.InvalidURL, UnicodeError) as error:
            raise Unreachable(f"{url} is no address of a service: {error}") from None

    # ---- jobs

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[str | Quote] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        after: Sequence[str] | None = None,
        continues: str | None = None,
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> Job:
        """Make a job of a prompt or of chat messages; fields are those of POST /v1/jobs.

        after names jobs that must succeed before it starts, continues (the field "continue") the one whose prompt and
        output its own begins with.

        A submission whose answer was lost on the way is sent again under the same Idempotency-Key: it makes one job.
        """
        named = {"prompt": prompt, "messages": messages, "after": after, "continue": continues}
        body = {name: value for name, value in named.items() if value is not None}
        headers = {"Idempotency-Key": idempotency_key or secrets.token_hex(16)}
        return cast(Job, self._post("/v1/jobs", _json({**body, **fields}), headers))

    def get(self, job_id: str) -> Job:
        return cast(Job, self._call("GET", f"/v1/jobs/{job_id}"))

    def cancel(self, job_id: str) -> Job:
        return cast(Job, self._call("POST", f"/v1/jobs/{job_id}/cancel"))

    def jobs(self, *, status: str | None = None, page_size: int = 100) -> Iterator[Job]:
        """All jobs of the tenant, newest first, page by page."""
        query: dict[str, str | int] = {"limit": page_size} | ({"status": status} if status else {})
        while True:
            page = self._call("GET", "/v1/jobs", params=query)
            yield from cast(list[Job], page["data"])
            if not page["has_more"]:
                return
            query["after"] = page["last_id"]

    def events(self, job_id: str, after: int = 0) -> Iterator[Event]:
        """The job's events with numbers above after, each once, in order, as they come, up to the terminal one.

        A dropped connection is opened again behind the last event. Raises Unreachable, or the Refused that asked to
        come again, when ten tries in a row brought no event, and Broken when the numbers have a gap or repeat.
        """
        last, failures = after, 0
        while True:
            before = last
            problem: ClientError = Unreachable(f"{self.url} ended the stream of {job_id} before the job's end")
            try:
                for event in self._stream(job_id, last):
                    if event.number != last + 1:
                        raise Broken(f"{self.url} sent event {event.number} of {job_id} after event {last}")
                    last = event.number
                    yield event
                    if event.ends_log:
                        return
            except _Ended:
                return
            except Unreachable as error:
                problem = error
            except Refused as error:
                if error.status not in _RETRYABLE:
                    raise
                problem = error
            failures = 0 if last > before else failures + 1
            if failures == _TRIES:
                raise problem
            time.sleep(self._pause_s(failures, problem))

    def wait(self, job_id: str) -> Job:
        """The job, once it has ended."""
        for _ in self.events(job_id):
            pass
        return self.get(job_id)

    # ---- files and batches

    def upload(self, file: Path, *, purpose: str = "batch") -> File:
        with file.open("rb") as content:
            upload = {"file": (file.name, content, "application/octet-stream")}
            return cast(File, self._call("POST", "/v1/files", data={"purpose": purpose}, files=upload))

    def create_batch(self, input_file_id: str, *, endpoint: str, completion_window: str = "24h") -> Batch:
        body = {"input_file_id": input_file_id, "endpoint": endpoint, "completion_window": completion_window}
        return cast(Batch, self._post("/v1/batches", _json(body), {}))

    def batch(self, batch_id: str) -> Batch:
        return cast(Batch, self._call("GET", f"/v1/batches/{batch_id}"))

    def batch_progress(self, batch_id: str, *, every_s: float = 0.5) -> Iterator[Batch]:
        """The batch again and again, the last time when it has ended.

        Raises Unreachable when ten looks in a row got no answer.
        """
        failures = 0
        while True:
            try:
                batch = self.batch(batch_id)
            except (Unreachable, Refused) as error:
                failures += 1
                if failures == _TRIES or (isinstance(error, Refused) and error.status not in _RETRYABLE):
                    raise
                time.sleep(self._pause_s(failures, error))
                continue
            failures = 0
            yield batch
            if batch["status"] in ENDED_BATCH:
                return
            time.sleep(every_s)

    def cancel_batch(self, batch_id: str) -> Batch:
        return cast(Batch, self._call("POST", f"/v1/batches/{batch_id}/cancel"))

    def download(self, file_id: str, destination: Path) -> None:
        """Write a file's content to destination: all of it, or nothing where it could not be had."""
        draft = destination.with_name(f".{destination.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with self._open(f"/v1/files/{file_id}/content") as response, draft.open("xb") as file:
                for piece in _received(response, self.url):
                    file.write(piece)
            draft.replace(destination)
        finally:
            draft.unlink(missing_ok=True)

    # ---- the connection

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _post(self, path: str, content: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
        return self._call("POST", path, content=content, headers={**headers, "Content-Type": "application/json"})

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """The JSON object that a request is answered with.

        What does no more when it is asked twice is asked again where the connection broke before the answer: a server
        may close one that was idle at the moment it is used again.
        """
        request = self._http.build_request(method, path, **options)
        sendings = _SENDINGS if method == "GET" or "Idempotency-Key" in request.headers else 1
        while True:
            sendings -= 1
            try:
                response = self._send(request, stream=False)
                break
            except Unreachable as error:
                if not sendings or isinstance(error.__cause__, httpx.ConnectError):
                    raise
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Broken(f"{response.url} did not answer with a JSON object: is this an Everbatch service?")
        return answer

    @contextmanager
    def _open(self, path: str, headers: Mapping[str, str] | None = None) -> Iterator[httpx.Response]:
        """An answer whose body is yet to be read."""
        request = self._http.build_request("GET", path, headers=headers, timeout=_STREAM_TIMEOUT)
        response = self._send(request, stream=True)
        try:
            yield response
        finally:
            response.close()

    def _send(self, request: httpx.Request, *, stream: bool) -> httpx.Response:
        try:
            response = self._http.send(request, stream=stream)
            if not response.is_success:
                response.read()
        except httpx.HTTPError as error:
            raise Unreachable(_unanswered(self.url, error)) from error
        if response.is_success:
            return response
        raise _refusal(response)

    def _stream(self, job_id: str, after: int) -> Iterator[Event]:
        """One connection's events. Raises _Ended when no event above after will ever come."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(after)} if after else {})
        with self._open(f"/v1/jobs/{job_id}/events", headers) as response:
            if response.status_code == 204:
                raise _Ended
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise Broken(f"{response.url} did not answer with an event stream: is this an Everbatch service?")
            parser = EventParser()
            for piece in _received(response, self.url):
                yield from parser.feed(piece)

    def _pause_s(self, failures: int, problem: ClientError) -> float:
        """0.2 s, 0.4 s … 5 s, or what the server asked for, never more than a minute."""
        if isinstance(problem, Refused) and problem.retry_after_s is not None:
            return min(problem.retry_after_s, 60.0)
        return min(self._first_pause_s * 2.0**failures, _LONGEST_PAUSE_S)


class _Ended(Exception):
    """The log had ended before the event that was asked for."""


class EventParser:
    """Server-Sent Events out of bytes that may be cut anywhere.

    Lines end at CR, LF or CRLF and nowhere else (a text may hold U+2028); a block that the connection cut short is no
    event. Stricter than a browser: each block with data must be one of ours, with a number, a kind and a JSON object.
    """

    _LINE_END = re.compile(rb"\r\n|\r|\n")
    _BOM = b"\xef\xbb\xbf"

    def __init__(self) -> None:
        self._rest = b""
        self._is_start = True
        self._after_cr = False
        """The last piece ended in CR: a LF that opens the next one belongs to it."""
        self._clear()

    def feed(self, piece: bytes) -> list[Event]:
        """The events that this piece completes. Raises Broken for a block that is none of ours."""
        return [event for line in self._lines(piece) if (event := self._take(line)) is not None]

    def _lines(self, piece: bytes) -> list[bytes]:
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
            self._after_cr = False
        if not piece:
            return []
        self._after_cr = piece.endswith(b"\r")
        *lines, self._rest = self._LINE_END.split(self._rest + piece)
        if lines and self._is_start:
            lines[0] = lines[0].removeprefix(self._BOM)
            self._is_start = False
        return lines

    def _take(self, line: bytes) -> Event | None:
        if not line:
            return self._end_block()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"id":
                self._id = value
            case b"event":
                self._kind = value
            case b"data":
                self._data.append(value)
        return None  # a comment has an empty name; retry and unknown fields say nothing to us

    def _end_block(self) -> Event | None:
        number, kind, lines = self._id, self._kind, self._data
        self._clear()
        if not lines:
            return None
        try:
            data = json.loads(b"\n".join(lines))
            if not (isinstance(data, dict) and number.isdigit() and kind):
                raise ValueError
            return Event(int(number), kind.decode(), data)
        except (ValueError, RecursionError):
            raise Broken(
                f"The stream holds what is no event of a job, after id {number.decode(errors='replace')!r}"
            ) from None

    def _clear(self) -> None:
        self._id, self._kind = b"", b""
        self._data: list[bytes] = []


def _json(body: Mapping[str, Any]) -> bytes:
    """ASCII, so that even a lone surrogate reaches the server, whose answer names the field."""
    return json.dumps(body).encode()


def _received(response: httpx.Response, url: str) -> Iterator[bytes]:
    try:
        yield from response.iter_bytes()
    except httpx.HTTPError as error:
        raise Unreachable(_unanswered(url, error)) from error


def _refusal(response: httpx.Response) -> Refused:
    status, seconds = response.status_code, response.headers.get("retry-after", "")
    retry_after_s = float(seconds) if seconds.isdecimal() else None
    try:
        error = response.json()["error"]
        message, code, field = str(error["message"]), error["code"], error["param"]
    except (ValueError, KeyError, TypeError):
        message, code, field = f"{response.url} answered {status}", None, None
    return Refused(message, status=status, code=code, field=field, retry_after_s=retry_after_s)


def _unanswered(url: str, error: httpx.HTTPError) -> str:
    match error:
        case httpx.ConnectError():
            return f"Nothing answers at {url}: is the service running? (`everbatch up` starts one)"
        case httpx.TimeoutException():
            return f"{url} did not answer in time"
        case httpx.UnsupportedProtocol():
            return f"{url} is no address of a service: it must begin with http:// or https://"
    return f"The connection to {url} broke: {error}"


def _is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
