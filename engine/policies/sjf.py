"""Shortest job first, by predicted length; nobody starves."""

from __future__ import annotations

from engine.policies.base import Policy
from engine.request import Request

PATIENCE_S_PER_TOKEN = 0.05
"""Each token that a request is predicted to generate puts it so far behind, in seconds of arrival."""


class ShortestFirst(Policy):
    """By arrival + predicted tokens × patience: a request is overtaken only by those that came within that time."""

    def place(self, request: Request, *, arrived_s: float, expected_tokens: int) -> float:
        return arrived_s + PATIENCE_S_PER_TOKEN * expected_tokens
