"""What came of a simulation: when each request got its tokens, and what each step took."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.request import Finish, Request


@dataclass(slots=True)
class Trace:
    """What happened to a request. Seconds of the virtual clock."""

    request: Request
    arrived_s: float
    worker: int = -1
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    finish: Finish | None = None
    """How it ended; a request that is refused ends as it is handed over."""
    longest_gap_s: float = 0.0
    """The longest time between two of its tokens."""
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step of a worker."""

    worker: int
    began_s: float
    took_s: float
    num_decodes: int
    request_ids: tuple[str, ...]
    num_tokens: int
    """Tokens computed."""


@dataclass(slots=True)
class Report:
    """What came of a simulation."""

    traces: dict[str, Trace]
    steps: list[StepRecord]
    recomputed_tokens: int = 0
    preemptions: int = 0

    @property
    def makespan_s(self) -> float:
        return max((step.began_s + step.took_s for step in self.steps), default=0.0)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens."""
        return sum(trace.num_tokens for trace in self.traces.values()) / self.makespan_s

    def ttfts_s(self, wanted: Callable[[Request], bool]) -> list[float]:
        """Times to the first token of the requests that are wanted, sorted; infinite for those that got none."""
        chosen = (trace.ttft_s for trace in self.traces.values() if wanted(trace.request))
        return sorted(float("inf") if ttft is None else ttft for ttft in chosen)

    def stalls_s(self) -> list[float]:
        """The steps that sequences which decode had to wait for, sorted, once for each of these."""
        return sorted(step.took_s for step in self.steps for _ in range(step.num_decodes))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of sorted values that so large a share of them does not exceed: of 1 … 100, 99 at 0.99."""
    rank = math.ceil(share * len(ordered) - 1e-9)  # 0.07 · 100 is 7.000000000000001
    return ordered[max(rank - 1, 0)]


def jain(shares: Iterable[float]) -> float:
    """Jain's fairness index: 1 where all are equal, 1/n where one has everything. Source: Jain et al. 1984."""
    values = list(shares)
    squares = len(values) * sum(value * value for value in values)
    return sum(values) ** 2 / squares if squares else 1.0
