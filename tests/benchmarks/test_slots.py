"""The classic exercise keeps its two numbers."""

from __future__ import annotations

from benchmarks.slots import draw_lengths, run_continuous, static_slot_use


def test_continuous_batching_uses_the_slots_that_static_batching_wastes() -> None:
    lengths = draw_lengths()
    stats = run_continuous(lengths)
    assert stats.generated_tokens == stats.slot_steps == sum(lengths)
    assert stats.slot_steps / (stats.steps * stats.slots) >= 0.99
    assert round(static_slot_use(lengths), 2) == 0.54
