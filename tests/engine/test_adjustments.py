"""Bias, penalties and masks: cell by cell what the reference makes of a row at a time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.adjustments import adjust
from engine.counts import TokenCounts
from engine.request import Request, Sampling
from engine.step import Ints
from tests.engine.sampling_reference import adjusted, past_of

VOCABULARY = 45  # no multiple of 32
EOS_IDS = frozenset({2, 5})
IDS = st.integers(0, VOCABULARY - 1)


def mask_of(allowed: set[int]) -> Ints:
    words = np.zeros(-(-VOCABULARY // 32), dtype=np.uint32)
    for token_id in allowed:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.view(np.int32)


@st.composite
def rows(draw: st.DrawFn) -> tuple[Sampling, list[int], list[int], set[int] | None]:
    """(sampling, prompt, generated, what a mask allows)"""

    def maybe(strategy: st.SearchStrategy[Any], default: Any) -> Any:
        return draw(strategy) if draw(st.booleans()) else default

    sampling = Sampling(
        99,
        ignore_eos=draw(st.booleans()),
        repetition_penalty=maybe(st.floats(0.25, 4), 1.0),
        presence_penalty=maybe(st.floats(-2, 2), 0.0),
        frequency_penalty=maybe(st.floats(-2, 2), 0.0),
        logit_bias=maybe(st.dictionaries(IDS, st.floats(-100, 100), max_size=5).map(lambda d: tuple(d.items())), ()),
        allowed_ids=maybe(st.lists(IDS, min_size=1).map(tuple), None),
        bad_words=maybe(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)).map(tuple), ()),
        min_tokens=maybe(st.integers(0, 5), 0),
        stop_ids=maybe(st.lists(IDS, max_size=3).map(tuple), ()),
    )
    prompt_ids = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    generated_ids = draw(st.lists(st.integers(0, 6), max_size=8))
    return sampling, prompt_ids, generated_ids, maybe(st.sets(IDS), None)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(rows(), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_every_cell_is_what_the_reference_makes_of_it(rows: list[Any], seed: int) -> None:
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 5
    before = logits.clone()
    found = adjust(
        logits,
        [sampling for sampling, *_ in rows],
        pasts={
            row: past_of(Request("a", tuple(p), s, resumed_ids=tuple(g)))
            for row, (s, p, g, _) in enumerate(rows)
            if s.needs_past
        },
        masks={row: mask_of(allowed) for row, (*_, allowed) in enumerate(rows) if allowed is not None},
        eos_ids=EOS_IDS,
    )
    assert torch.equal(logits, before), "the model's logits are for the log-probabilities"
    for row, (sampling, prompt_ids, generated_ids, allowed) in enumerate(rows):
        expected = adjusted(
            logits[row].numpy(),
            sampling,
            prompt_ids=prompt_ids,
            generated_ids=generated_ids,
            eos_ids=EOS_IDS,
            allowed_by_mask=allowed,
        )
        assert np.array_equal(found[row].numpy(), expected)


def test_rows_that_ask_for_nothing_are_not_copied() -> None:
    logits = torch.randn(3, VOCABULARY, dtype=torch.bfloat16)
    samplings = [Sampling(9), Sampling(9, top_k=3, top_p=0.5, min_p=0.1), Sampling(9, stop_ids=(4,), top_logprobs=2)]
    assert adjust(logits, samplings, pasts={}, masks={}, eos_ids=EOS_IDS) is logits


def test_bf16_rows_are_adjusted_in_fp32() -> None:
    logits = torch.full((1, VOCABULARY), 100.0, dtype=torch.bfloat16)
    sampling = Sampling(9, logit_bias=((7, 0.125),))  # bf16 has no 100.125
    assert adjust(logits, [sampling], pasts={}, masks={}, eos_ids=EOS_IDS)[0, 7].item() == 100.125


def test_a_mask_with_fewer_words_than_the_vocabulary_forbids_the_rest() -> None:
    logits = torch.zeros(1, VOCABULARY)
    found = adjust(logits, [Sampling(9)], pasts={}, masks={0: mask_of({0, 31, 44})[:1]}, eos_ids=EOS_IDS)
    assert found[0].isfinite().nonzero().flatten().tolist() == [0, 31]


@pytest.mark.parametrize("length", [0, 10, 63, 64, 65, 300])
def test_counts_are_those_of_the_line_however_it_grows(length: int) -> None:
    draw = np.random.default_rng(length)
    prompt, generated = draw.integers(0, 200, 100).tolist(), draw.integers(0, 200, length).tolist()
    counts = TokenCounts(prompt, generated[: length // 2])
    for token_id in generated[length // 2 :]:
        counts.add(token_id)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == dict.fromkeys(prompt, 0) | Counter(generated)
