"""Batches: a file of requests in, an output and an error file out, together one line per row.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed | expired
        │  └─ failed   └───────────────┐
        └──────────▶ cancelling ◀──────┘ ──▶ cancelled

What clients ask of batches, and how their status moves; the worker advances them. A batch's row is locked before its
jobs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app import db, files, jobs, moves, notices, submissions
from app.addresses import check_url
from app.bodies import Body
from app.errors import Conflict, InvalidRequest, NotFound, QueueFull
from app.events import Event
from app.files import ExpiresAfter
from app.ids import new_id
from app.settings import Settings
from app.tables import Batch, Job

_LONGEST_WINDOW = timedelta(days=7)


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


class Request(Body):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: submissions.Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
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
        output_expires_after_s=None if request.output_expires_after is None else request.output_expires_after.seconds,
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
    kept = {
        batch.id: _counts(
            batch, batch.completed_rows, batch.total_rows or 0, batch.prompt_tokens or 0, batch.completion_tokens or 0
        )
        for batch in batches
        if batch.completed_rows is not None
    }
    return kept | _count_jobs(session, [batch for batch in batches if batch.id not in kept])


def _count_jobs(session: Session, batches: Collection[Batch]) -> dict[str, Counts]:
    if not batches:
        return {}
    rows = session.execute(
        select(
            Job.batch_id,
            func.count().filter(Job.status == moves.Status.SUCCEEDED),
            func.count().filter(Job.status.in_(moves.TERMINAL)),
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


def open_batches(session: Session) -> list[str]:
    """The ids of batches that have not ended, oldest first."""
    return list(session.scalars(select(Batch.id).where(Batch.status.in_(Batch.OPEN)).order_by(Batch.id)))


def num_unfinished(session: Session, batch_id: str) -> int:
    """How many of its jobs have not ended."""
    unfinished = Job.status.in_(["queued", "running"])
    return session.scalar(select(func.count()).where(Job.batch_id == batch_id, unfinished)) or 0


def lock_unchanged(session: Session, seen: Batch) -> Batch | None:
    """The batch, locked, if it still stands where it was seen; None if it was cancelled or advanced since."""
    batch = session.get_one(Batch, seen.id)
    _lock(session, batch)
    is_unchanged = all(getattr(batch, name) == getattr(seen, name) for name in ("status", "total_rows", "bytes_read"))
    return batch if is_unchanged else None


def set_status(session: Session, batch: Batch, status: Status) -> None:
    """The status of a locked batch, and when it was reached; at an end, when all its jobs have ended, their counts.

    A batch that ended tells it by webhooks.
    """
    moment = db.now(session)
    batch.status = status.value
    setattr(batch, f"{status.value}_at", moment)
    session.flush()
    if status in Batch.OPEN:
        return
    counts = _count_jobs(session, [batch])[batch.id]
    batch.completed_rows, batch.prompt_tokens = counts.completed, counts.prompt_tokens
    batch.completion_tokens = counts.completion_tokens
    notices.tell_of_batch(session, batch, counts.shown, moment)


def fail(session: Session, batch: Batch, *, code: str, message: str) -> list[Event]:
    """End a locked batch whose file cannot be used at all."""
    problem = {"code": code, "message": message, "line": None, "param": "input_file_id"}
    batch.errors = {"object": "list", "data": [problem]}
    batch.output_file_id = batch.error_file_id = None
    cancelled = jobs.cancel_batch(session, batch.id)
    set_status(session, batch, Status.FAILED)
    return cancelled
