"""Longest job first, by predicted length: for a set of work of which the end counts."""

from __future__ import annotations

from engine.policies.base import Policy
from engine.request import Request


class LongestFirst(Policy):
    """Graham's LPT rule, 1969: of what waits, the longest starts first. Somebody may starve while others arrive."""

    def place(self, request: Request, *, arrived_s: float, expected_tokens: int) -> float:
        return -expected_tokens
