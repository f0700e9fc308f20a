"""Who goes first: the policies, by name. A new one is a file here and a line below."""

from __future__ import annotations

from engine.policies.base import Policy
from engine.policies.fair import Fair
from engine.policies.fcfs import FirstComeFirstServed
from engine.policies.ljf import LongestFirst
from engine.policies.priority import Priority
from engine.policies.sjf import ShortestFirst
from engine.policies.tiered import Tiered

POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "sjf": ShortestFirst,
    "ljf": LongestFirst,
    "priority": Priority,
    "fair": Fair,
    "tiered": Tiered,
}
"""By the names that the setting takes."""

__all__ = ["POLICIES", "Policy", "Tiered"]
