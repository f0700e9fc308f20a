from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.request import Request, Sampling
from engine.sampling import CANDIDATES, MORE_CANDIDATES, sample, uniforms
from engine.step import Past
from tests.engine.sampling_reference import adjusted, chi_square_deviation, distribution, past_of

VOCABULARY = 1000


def make_logits(rows: int = 1, *, vocabulary: int = VOCABULARY, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def draw(logits: torch.Tensor, count: int, *, pasts: Mapping[int, Past] | None = None, **fields: Any) -> torch.Tensor:
    """`count` tokens from the same row of logits, under as many seeds."""
    samplings = [Sampling(max_tokens=99, **{"seed": seed} | fields) for seed in range(count)]
    rows = logits.expand(count, -1)
    return torch.tensor(sample(rows, samplings, [7] * count, pasts=pasts or {}, eos_ids=EOS_IDS).token_ids)


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = torch.zeros(2, 5)
    logits[0, 3] = logits[0, 4] = 1.0
    assert sample(logits, [Sampling(1, temperature=0.0)] * 2, [0, 0]).token_ids == [3, 0]


PROMPT = (3, 4, 7, 8)
GENERATED = (8, 9, 9, 10, 3, 9)
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.4}
MASKS = {
    "allowed_ids": tuple(range(0, VOCABULARY, 3)),
    "bad_words": ((9,), (3, 9, 12), (9, 3, 12)),  # the second is begun, the third is not
    "min_tokens": 7,
    "stop_ids": (15, 18),
}
BIAS = {"logit_bias": tuple((token_id, 2.5) for token_id in range(0, 60, 2))}
EOS_IDS = frozenset({6})


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
        {"temperature": 1.0, "choice": 3},
        {"temperature": 1.5, "min_p": 0.05},
        {"temperature": 1.5, "min_p": 0.05, "top_k": 30},
        {"temperature": 3.0, "min_p": 0.1, "top_p": 0.7},
        {"temperature": 2.0, "min_p": 0.02, "top_k": 30, "top_p": 0.9, "choice": 2**31 - 1},
        {"temperature": 1.5, **PENALTIES},
        {"temperature": 2.0, "top_p": 0.9, **BIAS},
        {"temperature": 2.0, "min_p": 0.02, **MASKS},
        {"temperature": 1.3, "min_p": 0.01, "top_k": 80, "top_p": 0.95, **PENALTIES, **MASKS, **BIAS},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_draws_follow_the_distribution(fields: dict[str, Any]) -> None:
    """That of the reference in float64, over as many seeds."""
    logits, count, sampling = make_logits(), 8_000, Sampling(99, **fields)
    request = Request("a", PROMPT, sampling, resumed_ids=GENERATED)
    pasts = dict.fromkeys(range(count), past_of(request)) if sampling.needs_past else {}
    wanted = adjusted(logits[0].double().numpy(), sampling, prompt_ids=PROMPT, generated_ids=GENERATED, eos_ids=EOS_IDS)
    found = torch.bincount(draw(logits, count, pasts=pasts, **fields), minlength=VOCABULARY).numpy()
    assert (
        chi_square_deviation(found, distribution(wanted, sampling)) < 3.5
    )  # once in 4000 times, were the seeds others


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 2000}], ids=str)
def test_draws_of_one_seed_follow_the_distribution_of_a_whole_vocabulary(fields: dict[str, Any]) -> None:
    """As a text draws: position by position, of as many tokens as a model has, likely ones and many that are not."""
    logits, count, vocabulary = make_logits(vocabulary=49_152, seed=1), 1_000, 49_152
    sampling = Sampling(99, seed=17, **fields)
    found = torch.tensor(sample(logits.expand(count, -1), [sampling] * count, range(count)).token_ids)
    counts = torch.bincount(found, minlength=vocabulary).numpy()
    assert chi_square_deviation(counts, distribution(logits[0].double().numpy(), sampling)) < 3.5


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


def test_choices_of_a_seed_are_streams_of_their_own_and_the_first_is_the_seeds() -> None:
    positions = list(range(2000))
    streams = [uniforms([7] * 2000, positions, [choice] * 2000) for choice in range(4)]
    assert np.array_equal(streams[0], uniforms([7] * 2000, positions))
    for choice, stream in enumerate(streams):
        for other in streams[:choice]:
            assert abs(np.corrcoef(stream, other)[0, 1]) < 0.1  # 4.5 standard deviations
    # Written down once: a resumed job's stream must not change with a new release.
    assert uniforms([7, 2**63 - 1], [3, 100], [0, 0]).tolist() == [0.5493743249193239, 0.7122486205461368]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_has_no_token_left_says_so_and_hurts_no_other(temperature: float) -> None:
    logits = make_logits().expand(4, -1).clone()
    logits[2, 5] = torch.nan
    plain = Sampling(1, temperature=temperature, seed=3, top_p=0.9)
    stuck = replace(plain, allowed_ids=(4, 5), bad_words=((4,), (5,)), top_logprobs=2)
    past = Past(0, (), np.zeros(0, np.int32), np.zeros(0, np.int32))
    sampled = sample(logits, [plain, stuck, plain, plain], [7] * 4, pasts={1: past})
    assert sampled.errors == {
        1: "No token may follow: allowed_ids, bad_words, min_tokens and grammar leave none.",
        2: "The model's logits are not finite numbers.",
    }
    alone = sample(logits[:1], [plain], [7]).token_ids[0]
    assert sampled.token_ids[0] == sampled.token_ids[3] == alone


@pytest.mark.parametrize("fields", [{"top_p": 0.6}, {"top_k": 500}, {"top_k": 5000, "top_p": 0.9}], ids=str)
def test_behind_the_first_candidates_equals_come_in_the_order_of_their_ids(fields: dict[str, Any]) -> None:
    logits = (make_logits(vocabulary=MORE_CANDIDATES + 2000) / 4).bfloat16()  # flat, and full of equals
    sampling = Sampling(1, **fields)
    weights = distribution(logits[0].float().numpy(), sampling)
    order = np.argsort(-weights, kind="stable")
    numbers = uniforms(range(300), [7] * 300)
    expected = order[np.searchsorted(weights[order].cumsum(), numbers, side="right")]
    assert draw(logits, 300, **fields).tolist() == expected.tolist()
