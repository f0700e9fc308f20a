"""Fair between tenants: virtual token counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

from engine.policies.base import Policy
from engine.request import Request

PREFILLED_COST = 1.0
GENERATED_COST = 2.0
"""What a token counts; a generated one takes a forward pass with few others, a prefilled one shares it with many."""

MAX_IDLE = 4096
"""Tenants that want nothing and whose counters are kept; beyond that, who left first starts anew."""


class Fair(Policy):
    """The tenant that has been served least, by cost over weight, goes first.

    A tenant that comes back from idleness is lifted to the least served of those that are there: time in which it
    wanted nothing earns it nothing. Between tenants that always want more, service stays within the bound of VTC:
    |S_a - S_b| ≤ 2 · max(cost of the longest prompt, cost of a full batch).
    Source: Sheng et al., Fairness in serving large language models, OSDI 2024, algorithm 2.
    """

    def __init__(self) -> None:
        self._served: dict[Hashable, float] = {}
        self._idle: dict[Hashable, None] = {}
        """Queues that nobody is of and that were served more than others: the first left first."""
        self._virtual_time: dict[int, float] = defaultdict(float)
        """By rank, the counter of the queue that was served last: the least of those that waited."""

    def queue(self, request: Request) -> Hashable:
        return request.tenant

    def turn(self, queue: Hashable, *, waited_s: float) -> tuple[float, ...]:
        return (self._served[queue],)

    def arrive(self, request: Request, *, is_idle: bool) -> None:
        queue = self.queue(request)
        if is_idle:
            self._idle.pop(queue, None)
            before = max(self._served.get(queue, 0.0), self._served_elsewhere(request))
            self._served[queue] = max(before, self._virtual_time[self.rank(request)])

    def _served_elsewhere(self, request: Request) -> float:
        """What the tenant was served elsewhere, in the measure of the queue's counter; here nothing is known of it."""
        return 0.0

    def depart(self, request: Request) -> None:
        queue = self.queue(request)
        if self._served[queue] <= self._virtual_time[self.rank(request)]:
            del self._served[queue]  # it would be lifted anyway
            return
        self._idle[queue] = None
        if len(self._idle) > MAX_IDLE:
            oldest = next(iter(self._idle))
            del self._idle[oldest], self._served[oldest]

    def join(self, request: Request, *, prefilled: int) -> None:
        queue, rank = self.queue(request), self.rank(request)
        self._virtual_time[rank] = max(self._virtual_time[rank], self._served[queue])  # the least of those that waited
        self._served[queue] += PREFILLED_COST * prefilled / request.weight

    def serve(self, request: Request, *, now: float, computed: int, generated: int) -> None:
        self._served[self.queue(request)] += GENERATED_COST * generated / request.weight
