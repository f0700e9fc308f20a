"""The line of those that wait, in the order of a policy."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Hashable, Iterator

from engine.policies.base import Policy
from engine.sequence import Sequence, State

Turn = tuple[tuple[float, ...], tuple[float, int]]


def _place(sequence: Sequence) -> tuple[float, int]:
    return sequence.place, sequence.number


class WaitingLine:
    """A sorted queue for each name that the policy gives; a walk visits them in the policy's order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._queues: dict[Hashable, list[Sequence]] = {}
        self._by_rank: Counter[int] = Counter()
        self._num_tokens = 0
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

    @property
    def num_tokens(self) -> int:
        """Tokens that are to be computed, cached ones counted too."""
        return self._num_tokens

    def holds(self, queue: Hashable) -> bool:
        return queue in self._queues

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._queues.setdefault(sequence.queue, []), sequence, key=_place)
        self._by_rank[sequence.request.rank] += 1
        self._num_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.queue]
        index = bisect.bisect_left(queue, _place(sequence), key=_place)
        assert queue[index] is sequence
        del queue[index]
        if not queue:
            del self._queues[sequence.queue]
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
        waited_s = 0.0
        if sequence.state is State.WAITING:
            waited_s = now - max(sequence.arrived_s, self._served_s.get(sequence.queue, sequence.arrived_s))
        return self._policy.turn(sequence.queue, waited_s=waited_s), _place(sequence)

    def walk(self, now: float) -> Walk:
        return Walk(self, self._queues, now)


class Walk:
    """One pass over the line. Whom it shows may leave the line meanwhile, and others may come back to it."""

    def __init__(self, line: WaitingLine, queues: dict[Hashable, list[Sequence]], now: float) -> None:
        self._line = line
        self._queues = queues
        self._now = now
        self._passed: Counter[Hashable] = Counter()
        self._left: set[Hashable] = set()

    def next(self) -> Sequence | None:
        """Who is next in the policy's order, as it is now; None at the end. The same again until told otherwise."""
        firsts = [
            line[self._passed[queue]]
            for queue, line in self._queues.items()
            if queue not in self._left and self._passed[queue] < len(line)
        ]
        if len(firsts) == 1:
            return firsts[0]
        return min(firsts, key=lambda sequence: self._line.turn(sequence, self._now), default=None)

    def pass_by(self, sequence: Sequence) -> None:
        """Go on behind it; it keeps its place."""
        self._passed[sequence.queue] += 1

    def leave(self, sequence: Sequence) -> None:
        """Go on without its queue."""
        self._left.add(sequence.queue)
