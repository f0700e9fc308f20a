"""The line of those that wait, in the order of a policy."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Hashable, Iterator
from operator import itemgetter

from engine.limits import Limits
from engine.policies.base import Policy
from engine.sequence import Sequence, State

MAX_PASSED_BY = 64
"""Waiting sequences of one tenant in one queue that a walk looks at and leaves where they are: they wait for a prefix.
Those behind them are left out of this walk."""

Turn = tuple[tuple[float, ...], tuple[float, int]]
Queues = dict[Hashable, dict[str, list[Sequence]]]
"""By the policy's name of a queue, and by tenant: who waits, in the order of their places."""


def _place(sequence: Sequence) -> tuple[float, int]:
    return sequence.place, sequence.number


class WaitingLine:
    """The queues that the policy names, each with a sorted line for every tenant; a walk visits them in its order."""

    def __init__(self, policy: Policy, limits: Limits) -> None:
        self._policy = policy
        self._limits = limits
        self._queues: Queues = {}
        self._by_rank: Counter[int] = Counter()
        self.changed: set[Hashable] = set()
        """Queues that somebody came to or left since a walk looked at them."""
        self._num_tokens = 0  # to be computed, cached ones counted too
        self._served_s: dict[Hashable, float] = {}  # when somebody of each queue joined last

    def __len__(self) -> int:
        return self._by_rank.total()

    def __iter__(self) -> Iterator[Sequence]:
        for lines in self._queues.values():
            for line in lines.values():
                yield from line

    @property
    def by_rank(self) -> Counter[int]:
        """Sequences by the rank of their request."""
        return self._by_rank

    def holds(self, queue: Hashable) -> bool:
        return queue in self._queues

    def problem_of(self, num_tokens: int) -> str | None:
        """Why a request with so many prompt tokens may not wait, if so: the line is full."""
        count, most = len(self), self._limits.max_waiting
        if most is not None and count >= most:
            return f"{count} requests wait already; max_waiting is {most}"
        most = self._limits.max_waiting_tokens
        if most is not None and count and self._num_tokens + num_tokens > most:
            return f"{self._num_tokens} tokens wait already; max_waiting_tokens is {most}"
        return None

    def add(self, sequence: Sequence) -> None:
        lines = self._queues.setdefault(sequence.queue, {})
        bisect.insort(lines.setdefault(sequence.request.tenant, []), sequence, key=_place)
        self.changed.add(sequence.queue)
        self._by_rank[sequence.request.rank] += 1
        self._num_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        lines, tenant = self._queues[sequence.queue], sequence.request.tenant
        index = bisect.bisect_left(lines[tenant], _place(sequence), key=_place)
        assert lines[tenant][index] is sequence
        del lines[tenant][index]
        if not lines[tenant]:
            del lines[tenant]
        if not lines:
            del self._queues[sequence.queue]
        self.changed.add(sequence.queue)
        self._by_rank[sequence.request.rank] -= 1
        self._num_tokens -= sequence.num_tokens

    def leave(self, sequence: Sequence, now: float) -> None:
        """It joins the batch: its queue is served."""
        self.remove(sequence)
        self._served_s[sequence.queue] = now

    def turn(self, sequence: Sequence, now: float) -> Turn:
        """The policy's order between any two sequences, waiting or not: the smaller goes first.

        A queue waits from when it was served last: its second one has not waited as long as it has been there.
        """
        queue, waited_s = sequence.queue, 0.0
        if sequence.state is State.WAITING:
            waited_s = now - max(sequence.arrived_s, self._served_s.get(queue, 0.0))
        return self._policy.turn(queue, waited_s=waited_s), _place(sequence)

    def forget(self, queue: Hashable) -> None:
        """Nobody of this queue waits or runs any more."""
        self._served_s.pop(queue, None)

    def walk(self, now: float) -> Walk:
        return Walk(self, self._queues, now)


class Walk:
    """One pass over the line, as long as there is room for somebody of its rank.

    Whom it shows may leave the line meanwhile, and others may come back to it.
    """

    def __init__(self, line: WaitingLine, queues: Queues, now: float) -> None:
        self._line = line
        self._queues = queues
        self._now = now
        self._passed: dict[tuple[Hashable, str], int] = {}  # of each line, how many from its head on
        self._closed_from: float = math.inf
        self._firsts: dict[Hashable, tuple[Turn, Sequence]] = {}  # of each queue, those passed by left out
        line.changed = set(queues)

    def next(self) -> Sequence | None:
        """Who is next in the policy's order, as it is now; None at the end. The same again until told otherwise."""
        if self._closed_from <= 0:
            return None
        for queue in self._line.changed:
            self._look_at(queue)
        self._line.changed.clear()
        firsts = [first for first in self._firsts.values() if first[1].rank < self._closed_from]
        return min(firsts, key=itemgetter(0))[1] if firsts else None

    def pass_by(self, sequence: Sequence) -> None:
        """It waits for something of its own: those behind it may go first."""
        line = sequence.queue, sequence.request.tenant
        self._passed[line] = self._passed.get(line, 0) + 1
        self._line.changed.add(sequence.queue)

    def leave_out(self, sequence: Sequence) -> None:
        """Nobody of its tenant may join: others may go first."""
        self._passed[sequence.queue, sequence.request.tenant] = MAX_PASSED_BY
        self._line.changed.add(sequence.queue)

    def close_to(self, rank: int) -> None:
        """There is no room for this rank: nobody behind it of the same or a higher one may overtake."""
        self._closed_from = min(self._closed_from, rank)

    def _look_at(self, queue: Hashable) -> None:
        firsts = []
        for tenant, line in self._queues.get(queue, {}).items():
            passed = self._passed.get((queue, tenant), 0)
            if passed < min(len(line), MAX_PASSED_BY):
                firsts.append(line[passed])
        if firsts:
            first = min(firsts, key=_place)
            self._firsts[queue] = self._line.turn(first, self._now), first
        else:
            self._firsts.pop(queue, None)
