"""Python's garbage collector, kept out of the steps of an engine."""

from __future__ import annotations

import gc

_ALLOCATIONS = 50_000
"""Objects between two collections of the young: a step of a thousand sequences makes a few thousand, hardly any of
them in a cycle. With Python's 700, planning 1024 sequences took 1.43 ms instead of 1.08 (EPYC Milan, 4000 in line)."""


def collect_rarely() -> None:
    """Leave what is there now out of all collections, and collect the rest less often. For a process of its own."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, 10, 10)
