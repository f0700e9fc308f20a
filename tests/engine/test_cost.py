"""The cost of a step, learned from steps."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from engine.cost import CPU_SMALL, H200_8B, Coefficients, StepCost, Work

TRUTH = Coefficients(step=5.0, row=0.1, prefill_token=0.03, prefill_pair=1e-5, kv_position=4e-4)


def draw_work(rng: random.Random) -> Work:
    rows = rng.randrange(64)
    return Work(rows=rows, kv_read=rows * rng.randrange(2000)) + Work.piece(rng.randrange(2000), rng.randrange(512))


def test_it_finds_what_the_steps_cost() -> None:
    rng, cost = random.Random(0), StepCost(CPU_SMALL, weight=0.1)
    for _ in range(500):
        work = draw_work(rng)
        cost.observe(work, TRUTH.predict(work) * rng.lognormvariate(0, 0.03))
    for _ in range(50):
        work = draw_work(rng)
        assert abs(cost.predict(work) / TRUTH.predict(work) - 1) < 0.05


def test_a_step_that_something_else_disturbed_does_not_spoil_it() -> None:
    rng, cost = random.Random(0), StepCost(TRUTH, weight=10.0)
    for number in range(400):
        work = draw_work(rng)
        cost.observe(work, TRUTH.predict(work) * rng.lognormvariate(0, 0.03) + (5000.0 if number % 100 == 99 else 0.0))
    work = Work(rows=32, kv_read=32_000)
    assert abs(cost.predict(work) / TRUTH.predict(work) - 1) < 0.15


def test_steps_without_prompts_do_not_make_prompts_cheap_or_dear() -> None:
    rng, cost = random.Random(0), StepCost(TRUTH, weight=10.0)
    for _ in range(20_000):
        work = Work(rows=32, kv_read=rng.randrange(64_000))
        cost.observe(work, TRUTH.predict(work) * rng.lognormvariate(0, 0.05))
    piece = Work.piece(1000, 256)
    assert 0.5 < cost.predict(piece) / TRUTH.predict(piece) < 2.0


@given(st.floats(0, 100), st.integers(0, 4000), st.integers(1, 2000), st.integers(0, 64))
def test_the_most_tokens_that_fit_are_found(budget_ms: float, start: int, limit: int, rows: int) -> None:
    cost, planned = StepCost(H200_8B), Work(rows=rows, kv_read=rows * 500)
    count = cost.tokens_within(budget_ms, planned, start, limit)
    assert 0 <= count <= limit
    if count:
        assert cost.predict(planned + Work.piece(start, count)) <= budget_ms
    if count < limit:
        assert cost.predict(planned + Work.piece(start, count + 1)) > budget_ms


def test_a_fit_that_was_exact_learns_that_it_no_longer_is() -> None:
    rng, cost = random.Random(0), StepCost(TRUTH)
    for slower in (1.0, 4.0):
        for _ in range(1000):
            work = draw_work(rng)
            cost.observe(work, slower * TRUTH.predict(work))
    work = Work(rows=32, kv_read=32_000)
    assert abs(cost.predict(work) / (4.0 * TRUTH.predict(work)) - 1) < 0.25  # it still remembers the other half
