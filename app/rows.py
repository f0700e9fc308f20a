"""Rows of a batch: lines of its input file → submissions, and jobs → lines of its output and error files.

An input line has custom_id, method (POST), url and body; an output line has id, custom_id, response and error.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import Field

from app import moves, submissions
from app.bodies import Body, parse_object
from app.choices import Choice
from app.completions import completion_object
from app.errors import InvalidRequest, PayloadTooLarge, Refusal
from app.grammars import Grammars
from app.jobs import Submission
from app.models import Model
from app.prompts import Prompts
from app.settings import Settings
from app.tables import Batch, Job
from app.tiers import Plan, Tier

MAX_CUSTOM_ID_LENGTH = 512

_PIECE_BYTES = 1 << 16
_BOM = b"\xef\xbb\xbf"
_STORABLE = re.compile("[^\0\ud800-\udfff]+")
"""What Postgres and UTF-8 can hold."""


# ---- lines of the input file


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an input file."""

    number: int
    """From 1, blank lines included."""
    end: int
    """Where the next line starts, in bytes."""
    content: bytes | None
    """Without its end and without a byte order mark; None when it is longer than the caller takes."""
    is_blank: bool


def read_lines(stream: BinaryIO, *, start: int, number: int, max_bytes: int) -> Iterator[Line]:
    """The lines behind the byte at start, which number lines precede. No more than max_bytes of one is held.

    A line ends at LF, before which a CR is left out, and nowhere else: texts may hold U+2028, U+0085 and the like.
    """
    stream.seek(start)
    while piece := stream.readline(max_bytes + 2):
        number += 1
        content = piece.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            content = content.removeprefix(_BOM)
        is_blank, is_whole = not content.strip(), len(content) <= max_bytes
        while not piece.endswith(b"\n") and (piece := stream.readline(_PIECE_BYTES)):
            is_blank, is_whole = is_blank and not piece.strip(), False
        yield Line(number, stream.tell(), content if is_whole else None, is_blank)


def count_rows(stream: BinaryIO, *, most: int) -> int:
    """Lines of a file that are not blank, counted up to the most."""
    lines = read_lines(stream, start=0, number=0, max_bytes=_PIECE_BYTES)
    return sum(1 for _ in itertools.islice((line for line in lines if not line.is_blank), most))


# ---- rows


class _Envelope(Body):
    custom_id: Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID_LENGTH)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A line that was read: its body, or why it has none."""

    number: int
    """The line's."""
    custom_id: str | None
    """By which the client finds its answer; None where it cannot be told."""
    body: Mapping[str, Any] | Refusal


def row_of(line: Line, *, endpoint: str, max_bytes: int) -> Row:
    """Read a line that is not blank."""
    if line.content is None:
        return Row(line.number, None, PayloadTooLarge(f"the line is longer than {max_bytes} bytes"))
    try:
        envelope = submissions.validated(_Envelope, parse_object(line.content, max_bytes=max_bytes))
        if envelope.url != endpoint:
            raise InvalidRequest(f"url: input should be the batch's endpoint, '{endpoint}'", param="url")
    except InvalidRequest as refusal:
        return Row(line.number, _custom_id(line.content), refusal)
    except Refusal as refusal:
        return Row(line.number, None, refusal)
    return Row(line.number, envelope.custom_id, envelope.body)


def _custom_id(content: bytes) -> str | None:
    """The custom_id of a line that is a JSON object but no good row, so that its error can be found by it."""
    found = json.loads(content, parse_int=float).get("custom_id")
    is_usable = isinstance(found, str) and len(found) <= MAX_CUSTOM_ID_LENGTH and _STORABLE.fullmatch(found)
    return found if is_usable else None


@dataclass(frozen=True, slots=True)
class Desk:
    """What it takes to turn rows into submissions."""

    settings: Settings
    model: Model
    prompts: Prompts
    grammars: Grammars

    def submission_of(self, row: Row, endpoint: str) -> Submission:
        """What a row asks for, as a job of the bulk tier. Raises Refusal, which names a field as one of the row.

        Unavailable is of no row: to ask again may help.
        """
        if isinstance(row.body, Refusal):
            raise row.body
        request = submissions.parse_row(endpoint, row.body)
        try:
            submission = submissions.to_submission(
                request,
                plan=Plan.PAID,  # whatever the plan, the tier is bulk
                model=self.model,
                prompts=self.prompts,
                grammars=self.grammars,
                settings=self.settings,
            )
        except Refusal as refusal:
            raise _of_body(refusal) from None
        return dataclasses.replace(submission, tier=Tier.BULK, row_number=row.number, custom_id=row.custom_id)


def _of_body(refusal: Refusal) -> Refusal:
    """A refusal with its field named as one of the row; its message begins with the field or does not hold it."""
    if refusal.param is None:
        return refusal
    prefix = "body." if refusal.message.startswith(refusal.param) else ""
    return type(refusal)(f"{prefix}{refusal.message}", param=f"body.{refusal.param}")


# ---- lines of the output and the error file

_NO_ANSWER = {
    moves.Status.CANCELLED: {"code": "batch_cancelled", "message": "The request was cancelled before it was answered"},
    moves.Status.EXPIRED: {"code": "batch_expired", "message": "The batch expired before the request was answered"},
}


def encoded(line: Mapping[str, Any]) -> bytes:
    """A line of JSON in ASCII: readers that split lines at U+2028 read it too."""
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def line_of_job(job: Job, choices: Sequence[Choice], batch: Batch) -> dict[str, Any]:
    """What became of a row: an answer, an answer that refuses it, or none."""
    assert job.row_number is not None
    match moves.Status(job.status):
        case moves.Status.SUCCEEDED:
            status_code, body = 200, completion_object(job, choices, batch.endpoint)
        case moves.Status.FAILED:
            status_code, body = _refusal_of(job)
        case status:
            return _line(batch, job.row_number, job.custom_id, error=_NO_ANSWER[status])
    response = {"status_code": status_code, "request_id": job.id, "body": body}
    return _line(batch, job.row_number, job.custom_id, response=response)


def line_of_unread(row: Row, batch: Batch) -> dict[str, Any]:
    """What became of a row that a cancelled or expired batch never read."""
    status = moves.Status.CANCELLED if batch.status == "cancelling" else moves.Status.EXPIRED
    return _line(batch, row.number, row.custom_id, error=_NO_ANSWER[status])


def _line(
    batch: Batch,
    number: int,
    custom_id: str | None,
    *,
    response: Mapping[str, Any] | None = None,
    error: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    request_id = f"batch_req_{batch.id.removeprefix('batch_')}_{number}"
    return {"id": request_id, "custom_id": custom_id, "response": response, "error": error}


def _refusal_of(job: Job) -> tuple[int, dict[str, Any]]:
    """The status and body of a row that failed: 400 where it never ran, 500 where it failed while it did."""
    status_code, kind = (400, "invalid_request_error") if job.attempt == 0 else (500, "server_error")
    error = job.error or {}
    body = {"message": error.get("message"), "type": kind, "param": error.get("param"), "code": error.get("code")}
    return status_code, {"error": body}
