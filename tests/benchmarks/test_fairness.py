"""The picture and the table of policies."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.fairness import CONTESTANTS, STEP_BUDGET_MS, make_workload, row, run
from benchmarks.picture import continuous, draw, dynamic, static


def test_light_tenants_do_not_wait_for_a_heavy_one_and_no_stream_stalls() -> None:
    arrivals = make_workload(0, share=1 / 20)
    rows = {each.name: row(run(each, arrivals)) for each in CONTESTANTS if each.name in ("fcfs, tokens", "tiered")}
    plain, ours = rows["fcfs, tokens"], rows["tiered"]
    assert ours["light_p99_s"] < plain["light_p99_s"] / 4
    # In so short a run the cost of a very long prompt is still being learned: within the budget but for a tenth.
    assert ours["stall_p99_ms"] <= 1.1 * STEP_BUDGET_MS
    assert plain["stall_max_ms"] >= 5 * STEP_BUDGET_MS
    ElementTree.fromstring(draw(rows))


def test_slots_are_used_better_the_sooner_they_are_given_on() -> None:
    lengths = [8, 1, 2, 1, 1, 9, 1, 1]
    ends = [max(end for _, _, end in batching(lengths)) for batching in (dynamic, static, continuous)]
    assert ends == sorted(ends, reverse=True)
