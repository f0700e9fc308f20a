"""Quantities: values over rounds, their median and spread, and a bar to be met."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quantity:
    """What one quantity came to in each round."""

    values: Sequence[float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def shown(self) -> dict[str, object]:
        """For the JSON: median, least and greatest; the bar and whether the median meets it, where there is one."""
        median = statistics.median(self.values)
        shown: dict[str, object] = {
            "median": _rounded(median),
            "spread": [_rounded(min(self.values)), _rounded(max(self.values))],
        }
        if self.at_least is not None:
            shown |= {"at_least": self.at_least, "met": median >= self.at_least}
        if self.at_most is not None:
            shown |= {"at_most": self.at_most, "met": median <= self.at_most}
        return shown


@dataclass(frozen=True, slots=True)
class Bar:
    """What a quantity is to be."""

    at_least: float | None = None
    at_most: float | None = None


def over_rounds(
    rounds: int, measure: Callable[[], Mapping[str, float]], bars: Mapping[str, Bar] | None = None
) -> dict[str, Quantity]:
    """Measure again and again; bars by the quantity's name."""
    samples = [measure() for _ in range(rounds)]
    known = bars or {}
    return {
        name: Quantity([sample[name] for sample in samples], bar.at_least, bar.at_most)
        for name in samples[0]
        for bar in [known.get(name, Bar())]
    }


def percentile(values: Iterable[float], share: float) -> float:
    """The value that no more than 1 − share of them exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _rounded(value: float) -> float:
    """Three significant digits, or all before the point."""
    return float(f"{value:.3g}") if abs(value) < 100 else float(round(value))
