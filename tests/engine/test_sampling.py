from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.request import Sampling
from engine.sampling import CANDIDATES, sample, uniforms

VOCABULARY = 1000


def make_logits(rows: int = 1, *, vocabulary: int = VOCABULARY, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def draw(logits: torch.Tensor, count: int, **fields: Any) -> torch.Tensor:
    """`count` tokens from the same row of logits, under as many seeds."""
    samplings = [Sampling(max_tokens=1, **{"seed": seed} | fields) for seed in range(count)]
    return torch.tensor(sample(logits.expand(count, -1), samplings, [7] * count).token_ids)


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = torch.zeros(2, 5)
    logits[0, 3] = logits[0, 4] = 1.0
    assert sample(logits, [Sampling(1, temperature=0.0)] * 2, [0, 0]).token_ids == [3, 0]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 20},
        {"temperature": 1.5, "top_p": 0.6},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.8},
        {"temperature": 1.0, "top_k": CANDIDATES + 100},
        {"temperature": 5.0, "top_p": 0.99},  # flat: decided beyond the first candidates
    ],
    ids=str,
)
def test_draws_follow_the_distribution(fields: dict[str, Any]) -> None:
    logits, count = make_logits(), 20_000
    expected = expected_distribution(logits[0], **fields)
    found = torch.bincount(draw(logits, count, **fields), minlength=VOCABULARY) / count
    assert found[expected == 0].sum() == 0  # nothing that was cut off
    # The total variation of n draws of k tokens is about sqrt(k / 2πn) at most: 0.09 for the 1000 tokens here.
    kept = int((expected > 0).sum())
    assert 0.5 * (found - expected).abs().sum() < 1.2 * (kept / (2 * np.pi * count)) ** 0.5 + 0.005


def expected_distribution(
    logits: torch.Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> torch.Tensor:
    """The definition, a row at a time: temperature, the k likeliest, then the fewest whose share reaches top_p."""
    order = logits.argsort(descending=True)
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    kept = order[: top_k or None]
    share = probabilities[kept] / probabilities[kept].sum()
    count = int((share.cumsum(0) < top_p).sum()) + 1
    distribution = torch.zeros(len(logits), dtype=torch.float64)
    distribution[kept[:count]] = share[:count] / share[:count].sum()
    return distribution


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"top_p": 1e-9},
        {"temperature": 1e-30},
        {"temperature": 1e-30, "top_p": 0.5},
        {"top_k": 1, "top_p": 1e-9, "temperature": 100.0},
    ],
    ids=str,
)
def test_limits_that_leave_one_token_leave_the_likeliest(fields: dict[str, Any]) -> None:
    logits = make_logits()
    assert set(draw(logits, 50, **fields).tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize("top_k", [VOCABULARY, VOCABULARY + 1, 10**9])
def test_a_top_k_of_the_whole_vocabulary_keeps_all(top_k: int) -> None:
    logits = make_logits()
    assert torch.equal(draw(logits, 50, top_k=top_k), draw(logits, 50))


def test_tokens_that_cannot_be_are_never_drawn() -> None:
    logits = torch.full((1, 9), -torch.inf)
    logits[0, 4], logits[0, 6] = 0.0, 1.0
    assert set(draw(logits, 200).tolist()) == {4, 6}
    assert set(draw(logits, 200, top_p=0.99).tolist()) == {4, 6}
    assert set(draw(logits, 200, top_k=5).tolist()) == {4, 6}


def test_a_token_depends_on_its_own_row_alone() -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 4.0, "top_p": 0.95},
        {"temperature": 1.0, "top_k": 500, "top_p": 0.5},
    ]
    rows = 25
    logits = make_logits(rows).to(torch.bfloat16)
    samplings = [Sampling(1, seed=row, **kinds[row % len(kinds)]) for row in range(rows)]
    together = sample(logits, samplings, list(range(rows))).token_ids
    alone = [sample(logits[row : row + 1], [samplings[row]], [row]).token_ids[0] for row in range(rows)]
    assert together == alone
    backwards = sample(logits.flip(0), samplings[::-1], list(range(rows))[::-1]).token_ids
    assert backwards[::-1] == alone


def test_seed_and_position_name_the_draw() -> None:
    logits = make_logits().expand(3, -1)
    samplings = [Sampling(1, seed=2**63 - 1)] * 3
    first, again, later = (
        sample(logits, samplings, positions).token_ids for positions in ([1, 2, 3], [1, 2, 3], [4, 5, 6])
    )
    assert first == again
    assert first != later


def test_uniforms_are_even_and_unrelated() -> None:
    seeds, positions = np.divmod(np.arange(100_000), 300)
    numbers = uniforms(seeds.tolist(), positions.tolist())
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert np.sum((counts - 1000) ** 2 / 1000) < 150  # χ² with 99 degrees of freedom: above it once in 1400 times
    by_seed = numbers[: 333 * 300].reshape(333, 300)
    for left, right in ((by_seed[:, :-1], by_seed[:, 1:]), (by_seed[:-1], by_seed[1:])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.015  # 4.7 standard deviations
