from __future__ import annotations

import pytest

from engine.report import percentile


@pytest.mark.parametrize(
    ("count", "share", "value"),
    [
        (1, 0.5, 1),
        (4, 0.5, 2),
        (5, 0.5, 3),
        (100, 0.99, 99),
        (100, 0.07, 7),  # 0.07 · 100 is above 7 in floating point
        (101, 0.99, 100),
        (100, 1.0, 100),
    ],
)
def test_a_percentile_is_the_smallest_value_that_the_share_does_not_exceed(
    count: int, share: float, value: int
) -> None:
    assert percentile(range(1, count + 1), share) == value
