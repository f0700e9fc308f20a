"""Batches: a file of requests in, an output and an error file out, together one line per row.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed | expired
        │  └─ failed   └───────────────┐
        └──────────▶ cancelling ◀──────┘ ──▶ cancelled

A batch is advanced step by step, each step in one transaction: its rows are counted, then read in windows, and when
the last of its jobs has ended its files are written. Jobs and the place in the input file move together, so that a
crash neither loses nor doubles a row.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, BinaryIO

from sqlalchemy import func, select
from sqlalchemy.orm import Session, undefer

from app import db, files, jobs, submissions, webhooks
from app.addresses import check_url
from app.errors import Conflict, InvalidRequest, NotFound, QueueFull, Refusal
from app.events import Event
from app.ids import new_id
from app.jobs import Submission
from app.models import Model
from app.rows import Desk, Line, Row, count_rows, encoded, line_of_job, line_of_unread, read_lines, row_of
from app.settings import Settings
from app.shelf import Draft, Shelf
from app.tables import Batch, Job
from app.tiers import Tier

WINDOW_ROWS = 256
"""Rows that become jobs in one transaction."""
WINDOW_BYTES = 4 << 20
"""A window ends after so many bytes, so that a worker never holds more of a file than that and one line."""
MAX_UNFINISHED = 512
"""While so many of a batch's jobs have not ended, no further rows are read."""
_BATCH_LOCK = 0x45764262
"""Class of the advisory locks under which a batch is advanced."""
_LONGEST_WINDOW = timedelta(days=7)
_JOBS_AT_ONCE = 256
"""Rows of the database that are held while the files are written."""


class Status(StrEnum):
    """Where a batch stands."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows of a batch, and the tokens of those that were run."""

    total: int
    """0 until the rows were counted."""
    completed: int
    failed: int
    """Those that stand, or will stand, in the error file."""
    prompt_tokens: int
    completion_tokens: int

    @property
    def shown(self) -> dict[str, int]:
        """OpenAI's request_counts."""
        return {"total": self.total, "completed": self.completed, "failed": self.failed}


# ---- the client's side


class Request(submissions.Body):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: submissions.Metadata | None = None
    webhook: submissions.Webhook | None = None


def parse(body: Mapping[str, Any], settings: Settings) -> Request:
    """Raises InvalidRequest, naming the first wrong field."""
    request = submissions.validated(Request, body)
    if request.endpoint not in submissions.ROW_ENDPOINTS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(submissions.ROW_ENDPOINTS)}", param="endpoint")
    _window(request.completion_window)
    if request.webhook is not None:
        check_url(request.webhook.url, settings)
    return request


def _window(text: str) -> timedelta:
    """24h → 24 hours, 7d → 7 days. Raises InvalidRequest outside of 1h … 7d."""
    match = re.fullmatch(r"([1-9][0-9]{0,2})([hd])", text)
    window = match and timedelta(hours=int(match[1]) * (24 if match[2] == "d" else 1))
    if not window or window > _LONGEST_WINDOW:
        raise InvalidRequest("completion_window must be from 1h to 7d, for instance 24h", param="completion_window")
    return window


def create(session: Session, tenant_id: str, request: Request, settings: Settings) -> Batch:
    """Write a batch of the tenant's file.

    Raises NotFound, InvalidRequest, and QueueFull when settings.max_open_batches have not ended.
    """
    file = files.hold(session, tenant_id, request.input_file_id)
    if file.purpose != "batch":
        raise InvalidRequest(f"File '{file.id}' was not uploaded for purpose 'batch'", param="input_file_id")
    num_open = session.scalar(select(func.count()).where(Batch.tenant_id == tenant_id, Batch.status.in_(Batch.OPEN)))
    if (num_open or 0) >= settings.max_open_batches:
        raise QueueFull("You have too many batches in progress: wait for one to end")
    moment = db.now(session)
    batch = Batch(
        id=new_id("batch"),
        tenant_id=tenant_id,
        endpoint=request.endpoint,
        completion_window=request.completion_window,
        status=Status.VALIDATING.value,
        input_file_id=file.id,
        output_file_id=new_id("file"),
        error_file_id=new_id("file"),
        batch_metadata=request.metadata,
        webhook_url=None if request.webhook is None else request.webhook.url,
        rows_read=0,
        lines_read=0,
        bytes_read=0,
        created_at=moment,
        expires_at=moment + _window(request.completion_window),
    )
    session.add(batch)
    session.flush()
    return batch


def find(session: Session, tenant_id: str, batch_id: str) -> Batch:
    """The tenant's batch. Raises NotFound; somebody else's looks the same as none."""
    batch = session.scalar(select(Batch).where(Batch.id == batch_id, Batch.tenant_id == tenant_id))
    if batch is None:
        raise NotFound(f"There is no batch '{batch_id}'", param="id")
    return batch


def page(session: Session, tenant_id: str, *, after: str | None, limit: int) -> list[Batch]:
    """The tenant's batches, newest first, from behind the batch id after, at most limit of them."""
    query = select(Batch).where(Batch.tenant_id == tenant_id)
    if after is not None:
        query = query.where(Batch.id < after)
    return list(session.scalars(query.order_by(Batch.id.desc()).limit(limit)))


def cancel(session: Session, tenant_id: str, batch_id: str) -> tuple[Batch, list[Event]]:
    """Cancel a batch that still runs, and its jobs; what has succeeded is kept. Returns it and events to announce.

    A second cancel returns it as it is. Raises NotFound, and Conflict when it has ended or writes its files.
    """
    batch = _lock(session, find(session, tenant_id, batch_id))
    match Status(batch.status):
        case Status.CANCELLING | Status.CANCELLED:
            return batch, []
        case Status.VALIDATING | Status.IN_PROGRESS:
            batch.status = Status.CANCELLING.value
            batch.cancelling_at = db.now(session)
            session.flush()
            return batch, jobs.cancel_batch(session, batch.id)
    raise Conflict(f"Batch '{batch_id}' is {batch.status}: it cannot be cancelled")


def _lock(session: Session, batch: Batch) -> Batch:
    """The batch as it is now, whose status nobody else changes before this transaction ends. Its rows may come in."""
    session.refresh(batch, with_for_update={"key_share": True})
    return batch


def count(session: Session, batches: Collection[Batch]) -> dict[str, Counts]:
    """The rows of each batch, by its id. Rows that an ended batch never read count as failed."""
    rows = session.execute(
        select(
            Job.batch_id,
            func.count().filter(Job.status == jobs.Status.SUCCEEDED),
            func.count().filter(Job.status.in_(jobs.TERMINAL)),
            func.coalesce(func.sum(Job.prompt_tokens).filter(Job.started_at.is_not(None)), 0),
            func.sum(Job.completion_tokens),
        )
        .where(Job.batch_id.in_([batch.id for batch in batches]))
        .group_by(Job.batch_id)
    )
    found = {row[0]: [int(value) for value in row[1:]] for row in rows}
    return {batch.id: _counts(batch, *found.get(batch.id, [0, 0, 0, 0])) for batch in batches}


def _counts(batch: Batch, succeeded: int, ended: int, prompt_tokens: int, completion_tokens: int) -> Counts:
    total = batch.total_rows or 0
    if batch.status not in Batch.OPEN:
        ended = total
    return Counts(total, succeeded, ended - succeeded, prompt_tokens, completion_tokens)


# ---- the worker's side


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did."""

    events: Sequence[Event] = ()
    """To be announced after the commit."""
    moved: bool = True
    """Whether the batch came further; if not, it waits for its jobs."""


WAITS = Step(moved=False)


def open_batches(session: Session) -> list[str]:
    """The ids of batches that have not ended, oldest first."""
    return list(session.scalars(select(Batch.id).where(Batch.status.in_(Batch.OPEN)).order_by(Batch.id)))


def advance(session: Session, desk: Desk, shelf: Shelf, batch_id: str) -> Step:
    """Take the next step of a batch in the caller's transaction. Nothing is done while somebody else advances it.

    Raises Unavailable when the disk is full.
    """
    mine = session.scalar(select(func.pg_try_advisory_xact_lock(_BATCH_LOCK, func.hashtext(batch_id))))
    batch = session.get(Batch, batch_id, populate_existing=True) if mine else None
    if batch is None or batch.status not in Batch.OPEN:
        return WAITS
    try:
        stream = shelf.open(batch.input_file_id)
    except NotFound as missing:
        return _fail(session, batch, code="input_file_missing", message=missing.message)
    with stream:
        return _advance(session, desk, shelf, batch, stream)


def _advance(session: Session, desk: Desk, shelf: Shelf, batch: Batch, stream: BinaryIO) -> Step:
    if batch.total_rows is None:
        return _count_rows(session, batch, stream)
    num_unfinished = _num_unfinished(session, batch)
    is_reading = batch.status == Status.IN_PROGRESS and db.now(session) < batch.expires_at
    if is_reading and batch.rows_read < batch.total_rows:
        return _read_window(session, desk, batch, stream) if num_unfinished < MAX_UNFINISHED else WAITS
    if num_unfinished:
        return Step(jobs.cancel_batch(session, batch.id)) if batch.status == Status.CANCELLING else WAITS
    if batch.status == Status.IN_PROGRESS:
        return _enter(session, _lock(session, batch), Status.IN_PROGRESS, Status.FINALIZING)
    return _finalize(session, shelf, batch, _unread_rows(desk, batch, stream))


def _num_unfinished(session: Session, batch: Batch) -> int:
    unfinished = Job.status.in_(["queued", "running"])
    return session.scalar(select(func.count()).where(Job.batch_id == batch.id, unfinished)) or 0


def _enter(session: Session, locked: Batch, before: Status, after: Status) -> Step:
    """Move a batch on, unless it was cancelled meanwhile."""
    if locked.status == before:
        _set_status(session, locked, after)
    return Step()


def _set_status(session: Session, batch: Batch, status: Status) -> None:
    """The status, and when it was reached. A batch that ended tells it by a webhook."""
    moment = db.now(session)
    batch.status = status.value
    setattr(batch, f"{status.value}_at", moment)
    session.flush()
    if status not in Batch.OPEN and batch.webhook_url is not None:
        session.add(webhooks.delivery_of_batch(batch, count(session, [batch])[batch.id].shown, moment))


def _fail(session: Session, batch: Batch, *, code: str, message: str) -> Step:
    """End a batch whose file cannot be used at all."""
    cancelled = jobs.cancel_batch(session, batch.id)
    _lock(session, batch)
    problem = {"code": code, "message": message, "line": None, "param": "input_file_id"}
    batch.errors = {"object": "list", "data": [problem]}
    batch.output_file_id = batch.error_file_id = None
    _set_status(session, batch, Status.FAILED)
    return Step(cancelled)


# ---- reading


def _count_rows(session: Session, batch: Batch, stream: BinaryIO) -> Step:
    """Learn how many rows there are. A file without any fails the batch."""
    num_rows = count_rows(stream)
    if num_rows == 0 and batch.status == Status.VALIDATING:
        return _fail(session, batch, code="empty_file", message="The input file has no rows")
    _lock(session, batch)
    batch.total_rows = num_rows
    return _enter(session, batch, Status.VALIDATING, Status.IN_PROGRESS)


def _read_window(session: Session, desk: Desk, batch: Batch, stream: BinaryIO) -> Step:
    """Turn the next rows into jobs: to be run, or failed already where a row cannot run."""
    lines = _next_lines(stream, batch, desk.settings.max_body_bytes)
    if not lines:
        return _fail(session, batch, code="input_file_cut_off", message="The input file is shorter than it was")
    rows = [_row(line, batch, desk) for line in lines if not line.is_blank]
    first_lines = _known_custom_ids(session, batch, rows)
    deadline_s = (batch.expires_at - db.now(session)).total_seconds()
    good: list[Submission] = []
    bad: list[tuple[Row, Refusal]] = []
    for row in rows:
        try:
            _refuse_twin(row, first_lines)
            submission = desk.submission_of(row, batch.endpoint)
            good.append(dataclasses.replace(submission, batch_id=batch.id, deadline_s=deadline_s))
        except Refusal as error:
            bad.append((row, error))
    written = jobs.submit_rows(session, batch.tenant_id, good)
    for row, refusal in bad:
        written += _reject(session, batch, row, refusal, desk.model)
    batch.rows_read += len(rows)
    batch.lines_read, batch.bytes_read = lines[-1].number, lines[-1].end
    return Step(written)


def _row(line: Line, batch: Batch, desk: Desk) -> Row:
    return row_of(line, endpoint=batch.endpoint, max_bytes=desk.settings.max_body_bytes)


def _refuse_twin(row: Row, first_lines: dict[str, int]) -> None:
    """Raises InvalidRequest where an earlier line has the row's custom_id; else remembers the row's."""
    if row.custom_id is not None:
        first = first_lines.setdefault(row.custom_id, row.number)
        if first != row.number:
            raise InvalidRequest(f"custom_id '{row.custom_id[:64]}' stands already in line {first}", param="custom_id")


def _next_lines(stream: BinaryIO, batch: Batch, max_bytes: int) -> list[Line]:
    """The lines of the next window: at most WINDOW_ROWS rows, and about WINDOW_BYTES."""
    lines: list[Line] = []
    num_rows = 0
    for line in read_lines(stream, start=batch.bytes_read, number=batch.lines_read, max_bytes=max_bytes):
        lines.append(line)
        num_rows += not line.is_blank
        if num_rows == WINDOW_ROWS or line.end - batch.bytes_read >= WINDOW_BYTES:
            break
    return lines


def _known_custom_ids(session: Session, batch: Batch, rows: Sequence[Row]) -> dict[str, int]:
    """Those of the rows' custom_ids that earlier windows had, with the first line of each."""
    custom_ids = {row.custom_id for row in rows if row.custom_id is not None}
    known = session.execute(
        select(Job.custom_id, func.min(Job.row_number))
        .where(Job.batch_id == batch.id, Job.custom_id.in_(custom_ids))
        .group_by(Job.custom_id)
    )
    return {str(custom_id): int(first) for custom_id, first in known if first is not None}


def _reject(session: Session, batch: Batch, row: Row, refusal: Refusal, model: Model) -> list[Event]:
    error = {"code": refusal.code, "message": f"line {row.number}: {refusal.message}"}
    return jobs.reject_row(
        session,
        batch.tenant_id,
        batch=batch,
        row_number=row.number,
        custom_id=row.custom_id,
        tier=Tier.BULK,
        model=model.name,
        model_revision=model.revision,
        error=error if refusal.param is None else {**error, "param": refusal.param},
    )


# ---- writing


def _finalize(session: Session, shelf: Shelf, batch: Batch, unread: Iterable[Row]) -> Step:
    """Write the files and end the batch. Done again after a crash, it writes the same files in place."""
    num_lines, has_expired = 0, False
    with shelf.draft(batch.output_file_id) as output, shelf.draft(batch.error_file_id) as errors:
        for job in _jobs_in_order(session, batch):
            draft = output if job.status == jobs.Status.SUCCEEDED else errors
            draft.write(encoded(line_of_job(job, batch)))
            has_expired |= job.status == jobs.Status.EXPIRED
            num_lines += 1
        for row in unread:
            errors.write(encoded(line_of_unread(row, batch)))
            has_expired = True
            num_lines += 1
        if num_lines != batch.total_rows:
            return _fail(
                session, batch, code="rows_lost", message=f"{num_lines} answers for {batch.total_rows} rows were found"
            )
        batch.output_file_id = _keep(session, batch, output, "output")
        batch.error_file_id = _keep(session, batch, errors, "errors")
    if batch.status == Status.CANCELLING:
        _set_status(session, batch, Status.CANCELLED)
    else:
        _set_status(session, batch, Status.EXPIRED if has_expired else Status.COMPLETED)
    return Step()


def _jobs_in_order(session: Session, batch: Batch) -> Iterable[Job]:
    """The batch's jobs by line, a few hundred at a time."""
    query = select(Job).where(Job.batch_id == batch.id).order_by(Job.row_number).options(undefer(Job.output_text))
    return session.scalars(query.execution_options(yield_per=_JOBS_AT_ONCE))


def _unread_rows(desk: Desk, batch: Batch, stream: BinaryIO) -> Iterator[Row]:
    """The rows that a cancelled or expired batch left."""
    max_bytes = desk.settings.max_body_bytes
    for line in read_lines(stream, start=batch.bytes_read, number=batch.lines_read, max_bytes=max_bytes):
        if not line.is_blank:
            yield _row(line, batch, desk)


def _keep(session: Session, batch: Batch, draft: Draft, what: str) -> str | None:
    """The id of the file that the draft becomes; None when nothing was written to it."""
    if draft.size == 0:
        return None
    name = f"{batch.id}_{what}.jsonl"
    return files.add(session, batch.tenant_id, draft, filename=name, purpose=files.BATCH_OUTPUT).id
