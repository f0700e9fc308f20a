"""The default: tier, then tenant, then deadline, then arrival."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Mapping

from engine.policies.fair import Fair
from engine.request import Request

FLOORS = {1: 0.10, 2: 0.05}
"""Share of the tokens computed in WINDOW_S, by rank, where none are given. A tier below it that wants more goes first
and keeps slots."""
HEADROOM = 1.5
"""A tier is helped from so many times its floor on: help takes a while, and must come before the floor is reached."""
KEPT = 2.0
"""Below so many times its floor a tier gives up no slot: what it had leaves the window as fast as it came, and a slot
that is given up at the brink comes back too late."""
WINDOW_S = 10.0
AGEING_S = 60.0
"""A queue counts as of one tier higher each time that it has waited so long for anyone of it to join."""


class Tiered(Fair):
    """Tiers below their floor, then by rank; within a tier the tenant that was served least; within it by deadline.

    Strictly higher tiers take slots from lower ones. Floors and ageing see to it that lower ones never starve.
    """

    def __init__(self, floors: Mapping[int, float] = FLOORS) -> None:
        super().__init__()
        self._floors = floors
        self._recent: deque[tuple[float, int, int]] = deque()  # (when, rank, tokens), the oldest first
        self._tokens: Counter[int] = Counter()  # by rank, of what is in _recent
        self._total = 0  # of these

    def rank(self, request: Request) -> int:
        return request.rank

    def queue(self, request: Request) -> Hashable:
        return request.rank, request.tenant

    def place(self, request: Request, *, arrived_s: float, expected_tokens: int) -> float:
        return math.inf if request.deadline is None else request.deadline

    def turn(self, queue: Hashable, *, waited_s: float) -> tuple[float, ...]:
        assert isinstance(queue, tuple)
        rank: int = queue[0]
        return self._reached(rank, HEADROOM), rank - waited_s // AGEING_S, self._served[queue]

    def _served_elsewhere(self, request: Request) -> float:
        return request.counter

    def serve(self, request: Request, *, now: float, computed: int, generated: int) -> None:
        super().serve(request, now=now, computed=computed, generated=generated)
        self._recent.append((now, request.rank, computed))
        self._count(request.rank, computed)
        while self._recent[0][0] < now - WINDOW_S:
            _, rank, tokens = self._recent.popleft()
            self._count(rank, -tokens)

    def may_yield(self, rank: int) -> bool:
        return self._reached(rank, KEPT) >= 1.0

    def _reached(self, rank: int, times: float) -> float:
        """How much of so many times its floor a tier has had; 1 at most. Of two below, the needier goes first."""
        wanted = times * self._floors.get(rank, 0.0) * self._total
        return min(1.0, self._tokens[rank] / wanted) if wanted else 1.0

    def _count(self, rank: int, tokens: int) -> None:
        self._tokens[rank] += tokens
        self._total += tokens
