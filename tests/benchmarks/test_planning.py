"""The load that planning is measured on."""

from __future__ import annotations

from benchmarks.planning import WAITING, Load


def test_the_batch_stays_full_and_the_line_long_while_requests_come_and_go() -> None:
    load = Load(8)
    ended = len(load.plan_ms)
    for _ in range(700):
        load.step()
        stats = load.stats()
        assert stats.running + stats.waiting >= WAITING
    assert len(load.plan_ms) == len(load.commit_ms) == ended + 700
    assert stats.slot_steps >= 0.99 * 8 * stats.steps
    assert stats.generated_tokens > 8 * 600  # so some have ended, and others have joined
