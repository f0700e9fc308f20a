"""Strict priority of tiers; within a tier, first come, first served."""

from __future__ import annotations

from collections.abc import Hashable

from engine.policies.base import Policy
from engine.request import Request


class Priority(Policy):
    """A queue for each tier, the lowest rank first. Lower tiers starve while higher ones want all."""

    def rank(self, request: Request) -> int:
        return request.rank

    def queue(self, request: Request) -> Hashable:
        return request.rank

    def turn(self, queue: Hashable, *, waited_s: float) -> tuple[float, ...]:
        assert isinstance(queue, int)
        return (queue,)
