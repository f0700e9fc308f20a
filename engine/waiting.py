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
"""Waiting sequences that one walk looks at and leaves where they are: they wait for a prefix, or their cap."""

Turn = tuple[tuple[float, ...], tuple[float, int]]


def _place(sequence: Sequence) -> tuple[float, int]:
    return sequence.place, sequence.number


class QueueFullError(ValueError):
    """So many requests, or tokens, wait already."""


class WaitingLine:
    """A sorted queue for each name that the policy gives; a walk visits them in the policy's order."""

    def __init__(self, policy: Policy, limits: Limits) -> None:
        self._policy = policy
        self._limits = limits
        self._queues: dict[Hashable, list[Sequence]] = {}
        self._by_rank: Counter[int] = Counter()
        self.changed: set[Hashable] = set()
        """Queues that somebody came to or left since a walk looked at them."""
        self._num_tokens = 0  # to be computed, cached ones counted too
        self._served_s: dict[Hashable, float] = {}  # when somebody of each queue joined last

    def __len__(self) -> int:
        return self._by_rank.total()

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    @property
    def by_rank(self) -> Counter[int]:
        """Sequences by the rank of their request."""
        return self._by_rank

    def holds(self, queue: Hashable) -> bool:
        return queue in self._queues

    def check_room(self, num_tokens: int) -> None:
        """Raise QueueFullError where a request with so many prompt tokens may not wait."""
        count, most = len(self), self._limits.max_waiting
        if most is not None and count >= most:
            raise QueueFullError(f"{count} requests wait already; max_waiting is {most}")
        most = self._limits.max_waiting_tokens
        if most is not None and count and self._num_tokens + num_tokens > most:
            raise QueueFullError(f"{self._num_tokens} tokens wait already; max_waiting_tokens is {most}")

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._queues.setdefault(sequence.queue, []), sequence, key=_place)
        self.changed.add(sequence.queue)
        self._by_rank[sequence.request.rank] += 1
        self._num_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.queue]
        index = bisect.bisect_left(queue, _place(sequence), key=_place)
        assert queue[index] is sequence
        del queue[index]
        if not queue:
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

    def __init__(self, line: WaitingLine, queues: dict[Hashable, list[Sequence]], now: float) -> None:
        self._line = line
        self._queues = queues
        self._now = now
        self._passed: Counter[Hashable] = Counter()
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
        self._passed[sequence.queue] += 1
        self._line.changed.add(sequence.queue)
        if self._passed.total() >= MAX_PASSED_BY:
            self.close_to(0)

    def close_to(self, rank: int) -> None:
        """There is no room for this rank: nobody behind it of the same or a higher one may overtake."""
        self._closed_from = min(self._closed_from, rank)

    def _look_at(self, queue: Hashable) -> None:
        line, passed = self._queues.get(queue, ()), self._passed[queue]
        if passed < len(line):
            self._firsts[queue] = self._line.turn(line[passed], self._now), line[passed]
        else:
            self._firsts.pop(queue, None)
