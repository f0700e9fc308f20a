"""First come, first served."""

from __future__ import annotations

from engine.policies.base import Policy


class FirstComeFirstServed(Policy):
    """One line for everybody."""
