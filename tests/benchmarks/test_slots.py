"""The classic exercise keeps its two numbers."""

from __future__ import annotations

import pytest

from benchmarks.slots import SIGMA, draw_lengths, mean_slot_use, run_continuous, static_slot_use


def test_continuous_batching_uses_the_slots_that_static_batching_wastes() -> None:
    lengths = draw_lengths()
    stats = run_continuous(lengths)
    assert stats.generated_tokens == stats.slot_steps == sum(lengths)
    assert stats.slot_steps / (stats.steps * stats.slots) >= 0.99
    assert round(static_slot_use(lengths), 2) == 0.54


@pytest.mark.parametrize("seeds", [1, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_the_longest_first_by_a_rough_prediction_fills_the_slots_to_the_end(seeds: int) -> None:
    assert mean_slot_use(range(seeds), sigma=SIGMA) >= 0.997
