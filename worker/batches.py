"""Batches advance step by step: rows are counted, read in windows, and when the last job has ended, files are written.

What takes long, reading, tokenizing, writing files, is done between transactions, for Postgres ends one that waits for
its process. A transaction then takes the step, if the batch still stands where it was seen. Jobs and the place in the
input file move together, so that a crash neither loses nor doubles a row.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import redis
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, undefer

from app import batches, choices, db, events, files, jobs, limits, moves, uploads
from app.batches import Status
from app.choices import Choice
from app.db import Database
from app.errors import InvalidRequest, NotFound, QuotaExceeded, Refusal, Unavailable
from app.events import Event
from app.jobs import Submission
from app.rows import Desk, Line, Row, count_rows, encoded, line_of_job, line_of_unread, read_lines, row_of
from app.settlements import day_of
from app.shelf import Draft, Shelf
from app.tables import Batch, Job
from app.tiers import Tier

logger = logging.getLogger(__name__)

ROUND_S = 5.0
"""A round ends after so long, so that new batches and a stop are seen."""
WINDOW_ROWS = 1024
"""Rows that become jobs in one transaction."""
WINDOW_BYTES = 4 << 20
"""A window ends after so many bytes, so that a worker never holds more of a file than that and one line."""
WINDOW_S = 1.0
"""A window ends once its rows took so long to tokenize, so that no batch holds up the others for long."""
MAX_UNFINISHED = 4096
"""While so many of a batch's jobs have not ended, no further rows are read. A worker that takes thousands in a second
still has some until the next round."""
JOBS_AT_ONCE = 256
"""Rows of the database that are held while the files are written."""
BATCH_LOCK = 0x45764262
"""Class of the advisory locks under which a batch is advanced."""

Change = Callable[[Session, Batch], list[Event]]
"""What a step does to a locked batch, and the events to announce after the commit."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did."""

    events: Sequence[Event] = ()
    """Committed, to be announced."""
    moved: bool = True
    """Whether the batch came further; if not, it waits for its jobs."""


WAITS = Step(moved=False)


@dataclass(frozen=True, slots=True)
class Clerk:
    """Advances batches."""

    database: Database
    desk: Desk
    shelf: Shelf

    def advance(self, batch_id: str) -> Step:
        """Take the next step of a batch. Nothing is done while somebody else advances it.

        Raises Unavailable when the disk is full, or grammars cannot be checked.
        """
        with self.database.exclusively(BATCH_LOCK, batch_id) as is_mine:
            if not is_mine:
                return WAITS
            with self.database.autocommit() as session:
                seen = session.get(Batch, batch_id)
                if seen is None or seen.status not in Batch.OPEN:
                    return WAITS
                num_unfinished = batches.num_unfinished(session, batch_id)
                is_late = db.now(session) >= seen.expires_at
            try:
                stream = self.shelf.open(seen.input_file_id)
            except NotFound as missing:
                return self._change(seen, _failure("input_file_missing", missing.message))
            with stream:
                return self._advance(seen, stream, num_unfinished, is_late=is_late)

    def _advance(self, seen: Batch, stream: BinaryIO, num_unfinished: int, *, is_late: bool) -> Step:
        if seen.total_rows is None:
            return self._count_rows(seen, stream)
        if seen.status == Status.IN_PROGRESS and not is_late and seen.rows_read < seen.total_rows:
            return self._read_window(seen, stream) if num_unfinished < MAX_UNFINISHED else WAITS
        if num_unfinished:
            return self._change(seen, _cancel_jobs) if seen.status == Status.CANCELLING else WAITS
        if seen.status == Status.IN_PROGRESS:
            return self._change(seen, _enter(Status.FINALIZING))
        return self._finalize(seen, stream)

    def _change(self, seen: Batch, change: Change) -> Step:
        """Make the change in one transaction, unless the batch was cancelled since; the next step then sees that."""
        with self.database.transaction() as session:
            batch = batches.lock_unchanged(session, seen)
            return Step(change(session, batch)) if batch is not None else Step()

    # ---- reading

    def _count_rows(self, seen: Batch, stream: BinaryIO) -> Step:
        """Learn how many rows there are. A file without any, or with too many, fails the batch."""
        most = self.desk.settings.max_batch_rows
        num_rows = count_rows(stream, most=most + 1)
        if num_rows > most:
            return self._change(seen, _failure("too_many_rows", f"The input file has more than {most} rows"))
        if num_rows == 0 and seen.status == Status.VALIDATING:
            return self._change(seen, _failure("empty_file", "The input file has no rows"))

        def begin(session: Session, batch: Batch) -> list[Event]:
            batch.total_rows = num_rows
            return _enter(Status.IN_PROGRESS)(session, batch) if batch.status == Status.VALIDATING else []

        return self._change(seen, begin)

    def _read_window(self, seen: Batch, stream: BinaryIO) -> Step:
        """Turn the next rows into jobs: to be run, or failed already where a row cannot run."""
        lines: list[Line] = []
        rows: list[tuple[Row, Submission | Refusal]] = []
        began = time.monotonic()
        for line in _window(self._lines(seen, stream), seen.bytes_read):
            lines.append(line)
            if not line.is_blank:
                row = self._row(line, seen)
                rows.append((row, self._submission(row, seen)))
            if time.monotonic() - began > WINDOW_S:
                break
        if not lines:
            return self._change(seen, _failure("input_file_cut_off", "The input file is shorter than it was"))

        def write(session: Session, batch: Batch) -> list[Event]:
            taken, last = _affordable(session, batch, rows), lines[-1]
            if len(taken) < len(rows):
                last = next(line for line in lines if line.number == taken[-1][0].number)
            written = self._write_rows(session, batch, taken)
            batch.rows_read += len(taken)
            batch.lines_read, batch.bytes_read = last.number, last.end
            return written

        try:
            return self._change(seen, write)
        except QuotaExceeded:
            return WAITS  # for tomorrow

    def _write_rows(
        self, session: Session, batch: Batch, rows: Sequence[tuple[Row, Submission | Refusal]]
    ) -> list[Event]:
        first_lines = _known_custom_ids(session, batch, [row for row, _ in rows])
        deadline_s = (batch.expires_at - db.now(session)).total_seconds()
        good: list[Submission] = []
        bad: list[tuple[Submission, dict[str, str]]] = []
        for row, asked in rows:
            refusal = asked if isinstance(asked, Refusal) else None
            refusal = _twin(row, first_lines) or refusal
            if refusal is not None:
                bad.append((self._unusable(row, batch, deadline_s), _error_of(row, refusal)))
            elif isinstance(asked, Submission):
                good.append(dataclasses.replace(asked, batch_id=batch.id, deadline_s=deadline_s))
        jobs.submit_rows(session, batch.tenant_id, good)
        return jobs.reject_rows(session, batch.tenant_id, bad)

    def _lines(self, seen: Batch, stream: BinaryIO) -> Iterator[Line]:
        """Those that were not read yet."""
        max_bytes = self.desk.settings.max_body_bytes
        return read_lines(stream, start=seen.bytes_read, number=seen.lines_read, max_bytes=max_bytes)

    def _row(self, line: Line, seen: Batch) -> Row:
        return row_of(line, endpoint=seen.endpoint, max_bytes=self.desk.settings.max_body_bytes)

    def _submission(self, row: Row, seen: Batch) -> Submission | Refusal:
        try:
            return self.desk.submission_of(row, seen.endpoint)
        except Unavailable:
            raise
        except Refusal as refusal:
            return refusal

    def _unusable(self, row: Row, batch: Batch, deadline_s: float) -> Submission:
        """A row that cannot run, as the job that stands for it."""
        return Submission(
            tier=Tier.BULK,
            model=self.desk.model.name,
            model_revision=self.desk.model.revision,
            prompt_ids=(),
            sampling={},
            deadline_s=deadline_s,
            metadata={},
            batch_id=batch.id,
            row_number=row.number,
            custom_id=row.custom_id,
        )

    # ---- writing

    def _finalize(self, seen: Batch, stream: BinaryIO) -> Step:
        """Write the files and end the batch. Done again after a crash, it writes the same files in place."""
        num_lines, has_expired = 0, False
        with (
            self.shelf.draft(seen.output_file_id) as output,
            self.shelf.draft(seen.error_file_id) as errors,
        ):
            for job, of_job in self._jobs_in_order(seen):
                draft = output if job.status == moves.Status.SUCCEEDED else errors
                draft.write(encoded(line_of_job(job, of_job, seen)))
                has_expired |= job.status == moves.Status.EXPIRED
                num_lines += 1
            for line in self._lines(seen, stream):
                if not line.is_blank:  # a cancelled or expired batch left it
                    errors.write(encoded(line_of_unread(self._row(line, seen), seen)))
                    has_expired = True
                    num_lines += 1
            if num_lines != seen.total_rows:
                message = f"{num_lines} answers for {seen.total_rows} rows were found"
                return self._change(seen, _failure("rows_lost", message))
            for draft in (output, errors):
                if draft.size:
                    draft.keep()  # here, for a large file takes a while to reach the disk
            return self._change(seen, _end(output, errors, has_expired=has_expired))

    def _jobs_in_order(self, seen: Batch) -> Iterator[tuple[Job, list[Choice]]]:
        """The batch's jobs with their choices by line, a few hundred at a time."""
        last = 0
        while True:
            with self.database.autocommit() as session:
                found = session.scalars(
                    select(Job)
                    .where(Job.batch_id == seen.id, Job.row_number > last)
                    .order_by(Job.row_number)
                    .limit(JOBS_AT_ONCE)
                    .options(undefer(Job.output_text))
                ).all()
                told = choices.of(session, [job for job in found if not job.has_logprobs])
            for job in found:
                yield job, told[job.id] if job.id in told else self._choices_of(job)
            if len(found) < JOBS_AT_ONCE:
                return
            assert found[-1].row_number is not None
            last = found[-1].row_number

    def _choices_of(self, job: Job) -> list[Choice]:
        """Of a job with logprobs: those of hundreds of jobs are too much to be held."""
        with self.database.autocommit() as session:
            return choices.of_one(session, job)


def _window(lines: Iterable[Line], start: int) -> Iterator[Line]:
    """The lines of the next window: at most WINDOW_ROWS rows, and about WINDOW_BYTES."""
    num_rows = 0
    for line in lines:
        yield line
        num_rows += not line.is_blank
        if num_rows == WINDOW_ROWS or line.end - start >= WINDOW_BYTES:
            return


def _affordable(
    session: Session, batch: Batch, rows: Sequence[tuple[Row, Submission | Refusal]]
) -> list[tuple[Row, Submission | Refusal]]:
    """The first rows for which the tenant's quota of today suffices; one that never fits into a day's is refused.

    Raises QuotaExceeded when not even the first does.
    """
    room = limits.room(session, batch.tenant_id, day_of(db.now(session)))
    if room is None:
        return list(rows)
    taken: list[tuple[Row, Submission | Refusal]] = []
    left = room.left_today
    for row, asked in rows:
        tokens = asked.most_tokens if isinstance(asked, Submission) else 0
        if tokens > room.tokens_per_day:
            message = f"the row may use {tokens} tokens, of a quota of {room.tokens_per_day} a day"
            taken.append((row, QuotaExceeded(message, param="body.max_tokens")))
            continue
        if tokens > left:
            break
        left -= tokens
        taken.append((row, asked))
    if not taken and rows:
        raise QuotaExceeded
    return taken


def _twin(row: Row, first_lines: dict[str, int]) -> InvalidRequest | None:
    """Why the row is refused where an earlier line has its custom_id; else the row's is remembered."""
    if row.custom_id is None:
        return None
    first = first_lines.setdefault(row.custom_id, row.number)
    if first == row.number:
        return None
    return InvalidRequest(f"custom_id '{row.custom_id[:64]}' stands already in line {first}", param="custom_id")


def _known_custom_ids(session: Session, batch: Batch, rows: Sequence[Row]) -> dict[str, int]:
    """Those of the rows' custom_ids that earlier windows had, with the first line of each."""
    custom_ids = {row.custom_id for row in rows if row.custom_id is not None}
    known = session.execute(
        select(Job.custom_id, func.min(Job.row_number))
        .where(Job.batch_id == batch.id, Job.custom_id.in_(custom_ids))
        .group_by(Job.custom_id)
    )
    return {str(custom_id): int(first) for custom_id, first in known if first is not None}


def _error_of(row: Row, refusal: Refusal) -> dict[str, str]:
    """The error of a row that cannot run."""
    error = {"code": refusal.code, "message": f"line {row.number}: {refusal.message}"}
    return error if refusal.param is None else {**error, "param": refusal.param}


# ---- changes


def _failure(code: str, message: str) -> Change:
    return lambda session, batch: batches.fail(session, batch, code=code, message=message)


def _enter(status: Status) -> Change:
    def enter(session: Session, batch: Batch) -> list[Event]:
        batches.set_status(session, batch, status)
        return []

    return enter


def _cancel_jobs(session: Session, batch: Batch) -> list[Event]:
    return jobs.cancel_batch(session, batch.id)


def _end(output: Draft, errors: Draft, *, has_expired: bool) -> Change:
    """Give the batch its files, those that hold something, and the status that fits."""

    def end(session: Session, batch: Batch) -> list[Event]:
        batch.output_file_id = _file_of(session, batch, output, "output")
        batch.error_file_id = _file_of(session, batch, errors, "errors")
        finished = Status.EXPIRED if has_expired else Status.COMPLETED
        batches.set_status(session, batch, Status.CANCELLED if batch.status == Status.CANCELLING else finished)
        return []

    return end


def _file_of(session: Session, batch: Batch, draft: Draft, what: str) -> str | None:
    """The id of the file that the draft becomes; None when nothing was written to it."""
    if draft.size == 0:
        return None
    name = f"{batch.id}_{what}.jsonl"
    kept_s = batch.output_expires_after_s
    file = files.add(session, batch.tenant_id, draft, filename=name, purpose=files.BATCH_OUTPUT, expires_after_s=kept_s)
    return file.id


# ---- rounds


def advance_batches(clerk: Clerk, client: redis.Redis, *, nudge: Callable[[], None]) -> None:
    """One round: a step of each open batch, and again while any comes further.

    Several workers may do this at once: a batch is advanced by one of them. nudge is called when jobs were written.
    """
    started = time.monotonic()
    with clerk.database.autocommit() as session:
        waiting = batches.open_batches(session)
    while waiting and time.monotonic() - started < ROUND_S:
        waiting = [batch_id for batch_id in waiting if _advance(clerk, client, batch_id)]
        nudge()


def _advance(clerk: Clerk, client: redis.Redis, batch_id: str) -> bool:
    """Take one step of a batch; whether another one may follow.

    Whatever is wrong with its file or its rows ends neither the process nor the round, which are there for all batches:
    it stays where it is, and expires in time. Raises SQLAlchemyError when the database is away.
    """
    try:
        step = clerk.advance(batch_id)
    except Refusal as refusal:
        logger.warning("%s cannot be advanced, the next round tries again: %s", batch_id, refusal.message)
        return False
    except Exception as error:
        if isinstance(error, SQLAlchemyError):
            _ask(clerk.database)
        logger.exception("%s cannot be advanced, the next round tries again", batch_id)
        return False
    events.announce(client, step.events)
    return step.moved


def _ask(database: Database) -> None:
    """Raises SQLAlchemyError when the database does not answer."""
    with database.autocommit() as session:
        db.now(session)


def remove_strays(database: Database, shelf: Shelf) -> None:
    """One round, hourly at most: erase files and uploads that expired, and what crashes left of files."""
    with database.transaction() as session:
        over = [*files.remove_expired(session), *uploads.remove_bygone(session)]
    try:
        for file_id in over:
            shelf.erase(file_id)
        with database.transaction() as session:
            number = files.remove_strays(session, shelf)
    except OSError as error:
        logger.warning("stray files cannot be erased, the next round tries again: %s", error)
        return
    if number:
        logger.info("%d stray files were erased", number)
