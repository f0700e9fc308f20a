"""The cost of a step, learned from steps."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cost import CPU_SMALL, H200_8B, Coefficients, StepCost, Work

TRUTH = Coefficients(step=5.0, row=0.1, prefill_token=0.03, prefill_pair=1e-5, kv_position=4e-4)


def draw_work(rng: random.Random) -> Work:
    count = rng.randrange(64)
    decodes = Work(num_decodes=count, kv_read=count * rng.randrange(2000))
    return decodes + Work.piece(rng.randrange(2000), rng.randrange(512))


def test_it_finds_what_the_steps_cost() -> None:
    rng, cost = random.Random(0), StepCost(CPU_SMALL)
    for _ in range(500):
        work = draw_work(rng)
        cost.observe(work, TRUTH.predict(work) * rng.lognormvariate(0, 0.03))
    for _ in range(50):
        work = draw_work(rng)
        assert abs(cost.predict(work) / TRUTH.predict(work) - 1) < 0.05


def test_a_step_that_something_else_disturbed_does_not_spoil_it() -> None:
    rng, cost = random.Random(0), StepCost(TRUTH)
    for number in range(400):
        work = draw_work(rng)
        cost.observe(work, TRUTH.predict(work) * rng.lognormvariate(0, 0.03) + (5000.0 if number % 100 == 99 else 0.0))
    work = Work(num_decodes=32, kv_read=32_000)
    assert abs(cost.predict(work) / TRUTH.predict(work) - 1) < 0.15


def test_steps_without_prompts_do_not_make_prompts_cheap_or_dear() -> None:
    rng, cost = random.Random(0), StepCost(TRUTH)
    for _ in range(20_000):
        work = Work(num_decodes=32, kv_read=rng.randrange(64_000))
        cost.observe(work, TRUTH.predict(work) * rng.lognormvariate(0, 0.05))
    piece = Work.piece(1000, 256)
    assert 0.5 < cost.predict(piece) / TRUTH.predict(piece) < 2.0


def test_steps_that_no_line_fits_are_predicted_right_in_the_mean() -> None:
    """Caches make long sequences cheaper than a line through short ones says; no coefficient may be below 0 for it."""
    rng, cost, off = random.Random(0), StepCost(CPU_SMALL), list[float]()
    for number in range(600):
        rows = 1 + number % 64
        work = Work(num_decodes=rows, kv_read=rows * (50 + number)) + Work.piece(0, 32)
        elapsed_ms = (40.0 + 3.0 * rows - 1e-3 * work.kv_read) * rng.lognormvariate(0, 0.1)
        off.append(elapsed_ms / cost.predict(work) - 1)
        cost.observe(work, elapsed_ms)
    assert min(astuple(cost.coefficients)) >= 0.0
    assert abs(sum(off[100:]) / 500) < 0.05


@given(st.floats(0, 100), st.integers(0, 4000), st.integers(1, 2000), st.integers(0, 64))
def test_the_most_tokens_that_fit_are_found(budget_ms: float, start: int, limit: int, rows: int) -> None:
    cost, planned = StepCost(H200_8B), Work(num_decodes=rows, kv_read=rows * 500)
    count = cost.tokens_within(budget_ms, planned, start, limit)
    assert 0 <= count <= limit
    if count:
        assert cost.predict(planned + Work.piece(start, count)) <= budget_ms
    if count < limit:
        assert cost.predict(planned + Work.piece(start, count + 1)) > budget_ms


@pytest.mark.parametrize("prior", [CPU_SMALL, H200_8B])
def test_a_wrong_guess_is_forgotten_within_fifty_steps(prior: Coefficients) -> None:
    rng, cost = random.Random(0), StepCost(prior)
    learn(cost, rng, steps=50)
    assert error(cost, rng) < 0.05


@pytest.mark.parametrize("slower", [0.5, 2.0, 4.0])
def test_another_speed_is_learned_within_a_hundred_steps(slower: float) -> None:
    rng, cost = random.Random(0), StepCost(TRUTH)
    learn(cost, rng, steps=5000)
    learn(cost, rng, steps=100, slower=slower)
    assert error(cost, rng, slower=slower) < 0.05


def test_a_single_outlier_changes_next_to_nothing() -> None:
    rng, cost = random.Random(0), StepCost(TRUTH)
    learn(cost, rng, steps=1000)
    before, work = cost.spread, draw_work(rng)
    cost.observe(work, 50 * TRUTH.predict(work))
    assert error(cost, rng) < 0.02
    assert cost.spread < before + 0.05


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_steps_are_planned_to_stay_within_their_budget(noise: float) -> None:
    """Of steps as long as planned, hardly any takes longer than 30 ms; and not much of it is left."""
    rng, cost = random.Random(0), StepCost(TRUTH)
    learn(cost, rng, steps=1000, noise=noise)
    assert abs(cost.spread - noise) < 0.4 * noise + 0.005
    planned_ms = cost.planned_ms(30.0)
    times = [planned_ms * rng.lognormvariate(0, noise) for _ in range(1000)]
    assert sum(each > 30.0 for each in times) <= 5
    assert planned_ms >= 30.0 / (1 + 6 * noise + 0.02)


def learn(cost: StepCost, rng: random.Random, *, steps: int, slower: float = 1.0, noise: float = 0.03) -> None:
    for _ in range(steps):
        work = draw_work(rng)
        cost.observe(work, slower * TRUTH.predict(work) * rng.lognormvariate(0, noise))


def error(cost: StepCost, rng: random.Random, *, slower: float = 1.0) -> float:
    """Of the predictions for a hundred steps, in the mean of its size, as a share."""
    works = [draw_work(rng) for _ in range(100)]
    return sum(abs(cost.predict(work) / (slower * TRUTH.predict(work)) - 1) for work in works) / len(works)
