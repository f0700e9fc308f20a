"""A discrete-event simulation of workers: the real scheduler, block pool and policies, a virtual clock, a given cost.

What is evicted or preempted is computed again, and costs again: nothing but the model itself is replaced. The scheduler
does not see the cost that the simulation takes for the truth; it fits its own, as it does in production.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from engine.cost import Coefficients, Work
from engine.report import Report, StepRecord, Trace
from engine.request import Request
from engine.scheduler import Scheduler
from engine.step import Progress, Sampled, StepPlan

TOKEN = 1
"""What every step samples: outputs end by their number of tokens."""
AHEAD = 8
"""Requests of the first tier that a pulling worker takes beyond its slots, so that it has someone to preempt for."""


class Placement(StrEnum):
    """Which worker computes a request."""

    PULL = "pull"
    """One line for all; a worker takes from it what it has free slots for."""
    ROUND_ROBIN = "round_robin"
    LEAST_CONNECTIONS = "least_connections"
    """The one with the fewest requests, at arrival."""
    WEIGHTED = "weighted"
    """In proportion to the workers' speeds, at arrival."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and when it comes. It generates request.sampling.max_tokens, past any end-of-sequence token."""

    at_s: float
    request: Request


@dataclass(eq=False, slots=True)
class _Worker:
    number: int
    scheduler: Scheduler
    speed: float
    plan: StepPlan | None = None
    began_s: float = 0.0

    @property
    def load(self) -> int:
        stats = self.scheduler.stats()
        return stats.running + stats.waiting


@dataclass(eq=False)
class Simulation:
    """Workers, a line before them, and the events between them."""

    make_scheduler: Callable[[], Scheduler]
    cost: Coefficients
    speeds: Sequence[float] = (1.0,)
    """One for each worker: 2 computes a step in half the time."""
    placement: Placement = Placement.PULL
    noise: float = 0.0
    """σ of the logarithm of a step's time."""
    seed: int = 0
    _events: list[tuple[float, int, _Worker]] = field(default_factory=list, init=False)
    _line: dict[int, deque[Arrival]] = field(default_factory=lambda: defaultdict(deque), init=False)

    def run(self, arrivals: Sequence[Arrival]) -> Report:
        """Everything that arrives, to its end."""
        self._random = random.Random(self.seed)
        self._workers = [_Worker(n, self.make_scheduler(), speed) for n, speed in enumerate(self.speeds)]
        self._placed = [0.0] * len(self._workers)
        self._report = Report(
            {arrival.request.id: Trace(arrival.request, arrival.at_s) for arrival in arrivals}, steps=[]
        )
        coming = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))
        while coming or self._events:
            at_s = min(coming[0].at_s if coming else float("inf"), self._events[0][0] if self._events else float("inf"))
            while coming and coming[0].at_s <= at_s:
                self._arrive(coming.popleft())
            while self._events and self._events[0][0] <= at_s:
                _, _, worker = heapq.heappop(self._events)
                self._finish_step(worker, at_s)
            for worker in self._workers:
                if worker.plan is None:
                    self._begin_step(worker, at_s)
        for worker in self._workers:
            stats = worker.scheduler.stats()
            self._report.recomputed_tokens += stats.recomputed_tokens
            self._report.preemptions += stats.preemptions
        return self._report

    def _arrive(self, arrival: Arrival) -> None:
        if self.placement is Placement.PULL:
            self._line[arrival.request.rank].append(arrival)
        else:
            self._hand(arrival, self._choose(), arrival.at_s)

    def _choose(self) -> _Worker:
        """The worker of the next request, where it is not pulled: the least loaded by the placement's own measure."""
        match self.placement:
            case Placement.LEAST_CONNECTIONS:
                return min(self._workers, key=lambda worker: worker.load)
            case Placement.WEIGHTED:
                chosen = min(self._workers, key=lambda worker: (self._placed[worker.number] + 1) / worker.speed)
            case _:
                chosen = min(self._workers, key=lambda worker: self._placed[worker.number])
        self._placed[chosen.number] += 1
        return chosen

    def _hand(self, arrival: Arrival, worker: _Worker, now: float) -> None:
        self._report.traces[arrival.request.id].worker = worker.number
        # It has waited since it arrived, wherever that was.
        end = worker.scheduler.add(arrival.request, min(arrival.at_s, now))
        if end is not None:
            self._end(end, now)

    def _pull(self, worker: _Worker, now: float) -> None:
        """Take from the line what the worker has slots for, and beyond them a few of the first tier."""
        if len(self._workers) == 1:
            for line in self._line.values():
                while line:
                    self._hand(line.popleft(), worker, now)
            return
        stats = worker.scheduler.stats()
        room = stats.slots - stats.running - stats.waiting
        for rank in sorted(self._line):
            line, most = self._line[rank], room + (AHEAD if rank == 0 else 0)
            while line and most > 0:
                self._hand(line.popleft(), worker, now)
                room, most = room - 1, most - 1

    def _begin_step(self, worker: _Worker, now: float) -> None:
        self._pull(worker, now)
        for end in worker.scheduler.expire(now):
            self._end(end, now)
        worker.plan = worker.scheduler.plan(now)
        if worker.plan is None:
            return
        worker.began_s = now
        took_s = self.cost.predict(Work.of(worker.plan)) / 1000 / worker.speed
        if self.noise:
            took_s *= self._random.lognormvariate(0.0, self.noise)
        heapq.heappush(self._events, (now + took_s, worker.number, worker))

    def _finish_step(self, worker: _Worker, now: float) -> None:
        plan, worker.plan = worker.plan, None
        assert plan is not None
        took_s = now - worker.began_s
        gained = worker.scheduler.commit(plan, Sampled([TOKEN] * plan.num_sampling), elapsed_ms=1000 * took_s)
        self._report.steps.append(
            StepRecord(
                worker.number,
                began_s=worker.began_s,
                took_s=took_s,
                num_decodes=plan.num_decodes,
                request_ids=plan.request_ids,
                num_tokens=len(plan.token_ids),
            )
        )
        for progress in gained:
            self._note(self._report.traces[progress.request_id], now)
            if progress.finish:
                self._end(progress, now)

    def _end(self, progress: Progress, now: float) -> None:
        trace = self._report.traces[progress.request_id]
        trace.finish, trace.finished_s = progress.finish, now

    @staticmethod
    def _note(trace: Trace, now: float) -> None:
        """A token."""
        trace.num_tokens += 1
        if trace.last_token_s is None:
            trace.first_token_s = now
        else:
            trace.longest_gap_s = max(trace.longest_gap_s, now - trace.last_token_s)
        trace.last_token_s = now
