"""One writer for all jobs of a worker: the engine's outputs become event rows, then announcements.

    engine thread ── on_outputs ─▶ inbox ─▶ writer thread: buffers ─▶ one fenced write ─▶ Redis
    other threads ── end, lose ───▶

Persist first, then announce: only rows that the database accepted are published. The writer is also the one that ends
attempts, so that nobody else can see one as running that has ended, or the other way round.

While the database is away the buffers grow, by what their jobs may still generate, and nothing is lost. Where the reply
to a commit was lost, the rows may stand while the writer takes them for refused: it drops these attempts, and the lease
hands their jobs back.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import redis
from sqlalchemy.exc import SQLAlchemyError

from app import claims, events, logprobs, moves
from app.claims import Finished
from app.db import Database
from app.events import Delta, Event
from app.moves import Status
from app.tiers import Tier
from engine.request import Engine, Finish, Output, TokenLogprob
from worker.attempts import Attempt, Attempts, ChoiceOutput, Outcome
from worker.metrics import WorkerMetrics
from worker.vital import vital_thread

logger = logging.getLogger(__name__)

RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses between tries to write while the database is away; the last one repeats."""

ENGINE_ERROR = "engine_error"
"""The code of a job that the engine could not compute."""


@dataclass(frozen=True, slots=True)
class _Outputs:
    at: float
    outputs: Sequence[Output]


@dataclass(frozen=True, slots=True)
class _End:
    attempt: Attempt
    status: Status
    error: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class _Loss:
    attempts: Collection[Attempt]


class _Close:
    """The last word in the inbox."""


class ProgressWriter:
    def __init__(
        self,
        database: Database,
        client: redis.Redis,
        attempts: Attempts,
        engine: Engine,
        *,
        flush_interval_s: float,
        spelled: Callable[[TokenLogprob], logprobs.TokenLogprob],
        on_ended: Callable[[], None],
        metrics: WorkerMetrics,
    ) -> None:
        """spelled turns ids of tokens into their bytes.

        on_ended is called, on the writer's thread, when attempts have ended and their slots are free.
        """
        self._database = database
        self._redis = client
        self._attempts = attempts
        self._engine = engine
        self._flush_interval_s = flush_interval_s
        self._spelled = spelled
        self._on_ended = on_ended
        self._metrics = metrics
        self._inbox: queue.SimpleQueue[_Outputs | _End | _Loss | _Close] = queue.SimpleQueue()
        self._unwritten: set[Attempt] = set()  # those with something to be shown, or an ending, to be written
        self._due_at: float | None = None
        self._failures = 0
        self._is_closing = False
        self._thread = vital_thread("progress writer", self._run)

    # ---- from any thread, none of these blocks

    def on_outputs(self, outputs: Sequence[Output]) -> None:
        """Take the outputs of a step."""
        self._inbox.put(_Outputs(time.monotonic(), outputs))

    def end(self, attempt: Attempt, status: Status, error: Mapping[str, str] | None = None) -> None:
        """End an attempt from outside, with what it has shown so far, unless it has ended already."""
        self._inbox.put(_End(attempt, status, error))

    def lose(self, attempts: Collection[Attempt]) -> None:
        """Drop attempts whose jobs are this worker's no more."""
        self._inbox.put(_Loss(attempts))

    def close(self, *, timeout_s: float) -> bool:
        """Write what has come so far and end the thread; False if the database did not take it in time."""
        self._inbox.put(_Close())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the writer's thread

    def _run(self) -> None:
        while not (self._is_closing and not self._unwritten):
            self._receive()
            if self._due_at is not None and time.monotonic() >= self._due_at:
                self._flush()

    def _receive(self) -> None:
        """Sleep until word comes or a flush is due; take in all that came."""
        wait_s = None if self._due_at is None else max(0.0, self._due_at - time.monotonic())
        try:
            self._take(self._inbox.get(timeout=wait_s))
            while True:
                self._take(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _take(self, word: _Outputs | _End | _Loss | _Close) -> None:
        match word:
            case _Outputs(at, outputs):
                for output in outputs:
                    self._take_output(at, output)
            case _End(attempt, status, error):
                self._take_end(attempt, status, error)
            case _Loss(attempts):
                for attempt in attempts:
                    self._drop(attempt)
                self._on_ended()
            case _Close():
                self._is_closing = True
                self._write_within(0.0)

    def _take_output(self, at: float, output: Output) -> None:
        found = self._attempts.output_of(output.request_id)
        if found is None:
            if output.finish is None:
                self._engine.abort(output.request_id)  # it was dropped before the engine had it
            return
        attempt, choice = found
        if attempt.ending is not None or output.finish is Finish.ABORTED:
            return  # what comes after an end from outside is not shown
        is_first = choice.last_output_at is None
        self._metrics.observe(attempt, choice, output, at)
        choice.last_output_at = at
        choice.text += output.text
        choice.token_ids.extend(output.token_ids)
        choice.logprobs.extend(output.logprobs)
        if output.finish is not None:
            self._end_choice(attempt, choice, output)
        if (choice.text or choice.finish_reason) and choice not in attempt.unwritten:
            attempt.unwritten.append(choice)
        if attempt.unwritten and attempt.ending is None:
            self._unwritten.add(attempt)
            is_urgent = is_first and attempt.claim.tier is not Tier.BULK
            self._write_within(0.0 if is_urgent else self._flush_interval_s)

    def _end_choice(self, attempt: Attempt, choice: ChoiceOutput, output: Output) -> None:
        """The attempt ends with its last choice, or with the first one that cannot come to its end."""
        match output.finish:
            case Finish.ERROR:
                message = output.error or "The engine cannot compute this request"
                self._take_end(attempt, Status.FAILED, {"code": ENGINE_ERROR, "message": message})
            case Finish.EXPIRED:
                self._take_end(attempt, Status.EXPIRED, moves.DEADLINE_EXCEEDED)
            case Finish() as finish:
                choice.finish_reason = finish.value
                if all(each.finish_reason for each in attempt.outputs):
                    self._take_end(attempt, Status.SUCCEEDED, None)

    def _take_end(self, attempt: Attempt, status: Status, error: Mapping[str, str] | None) -> None:
        if attempt.ending is not None or attempt not in self._attempts:
            return
        self._abort(attempt)
        attempt.ending = Finished(
            attempt.claim.job_id,
            attempt.claim.attempt,
            status,
            finish_reason=attempt.outputs[0].finish_reason,
            error=error,
        )
        # Tokens that have no text are charged too.
        attempt.unwritten += [each for each in attempt.outputs if each.token_ids and each not in attempt.unwritten]
        self._unwritten.add(attempt)
        self._write_within(0.0)

    def _abort(self, attempt: Attempt) -> None:
        for choice in attempt.outputs:
            if choice.finish_reason is None:
                self._engine.abort(choice.request_id)

    def _write_within(self, seconds: float) -> None:
        due_at = time.monotonic() + max(seconds, self._pause_s)
        self._due_at = due_at if self._due_at is None else min(self._due_at, due_at)

    @property
    def _pause_s(self) -> float:
        return RETRY_S[min(self._failures, len(RETRY_S)) - 1] if self._failures else 0.0

    def _flush(self) -> None:
        self._due_at = None
        by_owner: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in self._unwritten:
            by_owner[attempt.owner].append(attempt)
        try:
            for owner, attempts in by_owner.items():
                self._write(owner, attempts)
            self._failures = 0
        except SQLAlchemyError as error:
            self._failures += 1
            self._metrics.failed_writes.inc()
            logger.warning("progress was not written, again in %s s: %s", self._pause_s, error)
            self._write_within(self._pause_s)

    def _write(self, owner: str, attempts: Sequence[Attempt]) -> None:
        """Persist the buffers of attempts and announce what was accepted: of those that go on, then of the others.

        The two have no rows in common, and the first, by far the more frequent one, is a single statement.
        """
        running = [attempt for attempt in attempts if attempt.ending is None]
        if running:
            deltas = self._deltas_of(running)
            with self._database.autocommit() as session:
                shown = events.append_tokens(session, owner, deltas)
            events.announce(self._redis, shown)
            self._settle(running, _refused(deltas, shown), [])
        ending = [(attempt, attempt.ending) for attempt in attempts if attempt.ending is not None]
        if ending:
            ended_attempts = [attempt for attempt, _ in ending]
            deltas = self._deltas_of(ended_attempts)
            with self._database.transaction() as session:
                moves.lock(session, [attempt.claim.job_id for attempt in ended_attempts])
                shown = events.append_tokens(session, owner, deltas)
                refused = _refused(deltas, shown)
                # An attempt whose last tokens were refused ends here without its end: the job would lack them.
                whole = [end for _, end in ending if end.job_id not in refused]
                ended = claims.finish(session, owner, whole)
            events.announce(self._redis, [*shown, *ended])
            self._settle(ended_attempts, refused, ended)

    def _deltas_of(self, attempts: Sequence[Attempt]) -> list[Delta]:
        return [
            Delta(
                job_id=attempt.claim.job_id,
                attempt=attempt.claim.attempt,
                number=number,
                text=choice.text,
                token_ids=tuple(choice.token_ids),
                choice=choice.index,
                finish_reason=choice.finish_reason,
                logprobs=logprobs.pack(map(self._spelled, choice.logprobs)) if choice.logprobs else None,
            )
            for attempt in attempts
            for number, choice in enumerate(attempt.unwritten, attempt.last_event + 1)
        ]

    def _settle(self, attempts: Sequence[Attempt], refused: Collection[str], ended: Sequence[Event]) -> None:
        """Empty the buffers of what was accepted; drop attempts of which anything was refused, by job id."""
        outcomes = {event.job_id: Outcome(event.kind) for event in ended}
        any_ended = False
        for attempt in attempts:
            job_id = attempt.claim.job_id
            if attempt.ending is None and job_id not in refused:
                attempt.last_event += len(attempt.unwritten)
                for choice in attempt.unwritten:
                    choice.text, choice.token_ids, choice.logprobs = "", [], []
                attempt.unwritten = []
                self._unwritten.remove(attempt)
                continue
            any_ended = True
            if job_id in outcomes:
                self._forget(attempt, outcomes[job_id])
            else:
                self._drop(attempt)
        if any_ended:
            self._on_ended()

    def _drop(self, attempt: Attempt) -> None:
        """Its job is not ours any more: end it here, and write nothing."""
        self._abort(attempt)
        self._forget(attempt, Outcome.LOST)

    def _forget(self, attempt: Attempt, outcome: Outcome) -> None:
        self._unwritten.discard(attempt)
        # Not counted twice, when its last write was refused and the lease drops it too.
        if self._attempts.end(attempt, outcome):
            self._metrics.count_end(attempt.claim.tier, outcome)


def _refused(deltas: Sequence[Delta], shown: Sequence[Event]) -> set[str]:
    """The jobs of which the database did not take all."""
    if len(shown) == len(deltas):
        return set()
    accepted = {(event.job_id, event.number) for event in shown}
    return {delta.job_id for delta in deltas if (delta.job_id, delta.number) not in accepted}
