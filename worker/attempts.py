"""What this process holds: the Celery messages that it took, and the attempts that it makes for them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from app.claims import Claim, Finished
from app.tiers import Tier
from engine.request import TokenLogprob


class Outcome(StrEnum):
    """What became of a job that a message named, as this worker saw it."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """By a revoke of its message."""
    EXPIRED = "expired"
    """Its deadline passed in the engine."""
    LOST = "lost"
    """Taken from this worker: cancelled by its tenant, expired, or given to another attempt."""
    DUPLICATE = "duplicate"
    """Not claimed: another message had named it before, or it had ended."""


class Task:
    """A Celery message in this worker's hands. It is done once each job that it names has ended here."""

    def __init__(
        self,
        tier: Tier,
        dispatch_numbers: Mapping[str, int],
        *,
        on_claimed: Callable[[], None],
        on_done: Callable[[], None],
    ) -> None:
        """on_claimed and on_done are called once each, in this order, from any thread; they must not block."""
        self.tier = tier
        self.dispatch_numbers = dispatch_numbers
        """The jobs it names, and the number with which each was dispatched."""
        self.on_claimed = on_claimed
        self.on_done = on_done
        self.is_revoked = False
        self.outcomes: Counter[Outcome] = Counter()

    @property
    def is_done(self) -> bool:
        return self.outcomes.total() == len(self.dispatch_numbers)


@dataclass(slots=True, eq=False)
class Attempt:
    """One run of a job in this worker's engine. From `last_event` on its fields belong to the progress writer."""

    claim: Claim
    owner: str
    """The incarnation that claimed it: the fence of its writes."""
    task: Task
    claimed_at: float
    """time.monotonic() of the claim."""
    outputs: tuple[ChoiceOutput, ...] = field(init=False)
    """One for each choice, in the order of their indices."""
    last_event: int = field(init=False)
    """The number of its last persisted event."""
    unwritten: list[ChoiceOutput] = field(default_factory=list)
    """Those that have something to be shown, in the order in which they had it first: a write that is tried again, its
    reply lost, gives them the same event numbers."""
    ending: Finished | None = None
    """How it ends, once that is known."""

    def __post_init__(self) -> None:
        # A job may come back while its earlier attempt is still being aborted, under another name.
        name = f"{self.claim.job_id}:{self.claim.attempt}"
        self.outputs = tuple(
            ChoiceOutput(index, f"{name}/{index}" if index else name, finish_reason=begun.finish_reason)
            for index, begun in enumerate(self.claim.begun)
        )
        self.last_event = self.claim.last_event


@dataclass(slots=True, eq=False)
class ChoiceOutput:
    """What the engine makes for one choice of a job. From `text` on its fields belong to the progress writer."""

    index: int
    request_id: str
    """Its name in the engine."""
    text: str = ""
    """What may be shown and is not persisted yet."""
    token_ids: list[int] = field(default_factory=list)
    """Generated since the last persisted event."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of these tokens, where the job wants them."""
    finish_reason: str | None = None
    """Set once the choice has ended."""
    last_output_at: float | None = None
    """time.monotonic() when the engine last said something of it."""


class Attempts:
    """The attempts of this process. Any thread may ask; the claimer adds, the progress writer ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: set[Attempt] = set()
        self._outputs: dict[str, tuple[Attempt, ChoiceOutput]] = {}  # by request id
        self._claiming: frozenset[str] = frozenset()

    def __len__(self) -> int:
        with self._lock:
            return len(self._attempts)

    def __contains__(self, attempt: Attempt) -> bool:
        with self._lock:
            return attempt in self._attempts

    def output_of(self, request_id: str) -> tuple[Attempt, ChoiceOutput] | None:
        """The attempt that a request is part of, and what it makes for it."""
        with self._lock:
            return self._outputs.get(request_id)

    def all(self) -> list[Attempt]:
        with self._lock:
            return list(self._attempts)

    def of(self, task: Task) -> list[Attempt]:
        with self._lock:
            return [attempt for attempt in self._attempts if attempt.task is task]

    def job_ids(self) -> set[str]:
        """Jobs that run here, and those whose claim is under way."""
        with self._lock:
            return {attempt.claim.job_id for attempt in self._attempts} | self._claiming

    def expect(self, job_ids: Collection[str]) -> None:
        """These jobs are being claimed: they may be this worker's before their attempts are here."""
        with self._lock:
            self._claiming = frozenset(job_ids)

    def add(self, attempts: Collection[Attempt]) -> None:
        """The attempts of the claim that was expected."""
        with self._lock:
            self._attempts.update(attempts)
            for attempt in attempts:
                self._outputs.update({output.request_id: (attempt, output) for output in attempt.outputs})
            self._claiming = frozenset()

    def end(self, attempt: Attempt, outcome: Outcome) -> bool:
        """Forget an attempt and count it for its task. Nothing happens, and False, for one that has ended before."""
        with self._lock:
            if attempt not in self._attempts:
                return False
            self._attempts.remove(attempt)
            for output in attempt.outputs:
                del self._outputs[output.request_id]
        self.count(attempt.task, outcome, 1)
        return True

    def count(self, task: Task, outcome: Outcome, jobs: int) -> None:
        """Count jobs of a task that ended here; the last of them makes it done."""
        with self._lock:
            was_done = task.is_done
            task.outcomes[outcome] += jobs
            is_done = task.is_done and not was_done
        if is_done:
            task.on_done()
