"""What this process holds: the Celery messages that it took, and the attempts that it makes for them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from app.claims import Claim, Finished
from app.tiers import Tier


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
    last_event: int = field(init=False)
    """The number of its last persisted event."""
    text: str = ""
    """What may be shown and is not persisted yet."""
    token_ids: list[int] = field(default_factory=list)
    """Generated since the last persisted event."""
    ending: Finished | None = None
    """How it ends, once that is known."""
    last_output_at: float | None = None
    """time.monotonic() when the engine last said something of it."""

    def __post_init__(self) -> None:
        self.last_event = self.claim.last_event

    @property
    def request_id(self) -> str:
        """Its name in the engine: a job may come back while its earlier attempt is still being aborted."""
        return f"{self.claim.job_id}:{self.claim.attempt}"


class Attempts:
    """The attempts of this process, by request id. Any thread may ask; the claimer adds, the progress writer ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: dict[str, Attempt] = {}
        self._claiming: frozenset[str] = frozenset()

    def __len__(self) -> int:
        with self._lock:
            return len(self._attempts)

    def get(self, request_id: str) -> Attempt | None:
        with self._lock:
            return self._attempts.get(request_id)

    def all(self) -> list[Attempt]:
        with self._lock:
            return list(self._attempts.values())

    def of(self, task: Task) -> list[Attempt]:
        with self._lock:
            return [attempt for attempt in self._attempts.values() if attempt.task is task]

    def job_ids(self) -> set[str]:
        """Jobs that run here, and those whose claim is under way."""
        with self._lock:
            return {attempt.claim.job_id for attempt in self._attempts.values()} | self._claiming

    def expect(self, job_ids: Collection[str]) -> None:
        """These jobs are being claimed: they may be this worker's before their attempts are here."""
        with self._lock:
            self._claiming = frozenset(job_ids)

    def add(self, attempts: Collection[Attempt]) -> None:
        """The attempts of the claim that was expected."""
        with self._lock:
            self._attempts.update({attempt.request_id: attempt for attempt in attempts})
            self._claiming = frozenset()

    def end(self, attempt: Attempt, outcome: Outcome) -> bool:
        """Forget an attempt and count it for its task. Nothing happens, and False, for one that has ended before."""
        with self._lock:
            if self._attempts.pop(attempt.request_id, None) is None:
                return False
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
