"""What is expected of outputs, and of memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.lengths import Lengths, peak_blocks


def test_the_quantile_is_of_those_that_got_as_far() -> None:
    lengths = Lengths()
    for length in range(1, 101):
        lengths.observe("a", length)
    assert lengths.expected("a", at_least=0, at_most=1000, quantile=0.9) == 90  # the 90th of 1 … 100
    assert lengths.expected("a", at_least=50, at_most=1000, quantile=0.5) == 75  # of 51 … 100
    assert lengths.expected("a", at_least=0, at_most=40) == 40


def test_a_new_kind_is_taken_for_the_others_and_the_first_for_half_of_its_limit() -> None:
    lengths = Lengths()
    assert lengths.expected("a", at_least=0, at_most=100) == 50
    assert lengths.expected("a", at_least=50, at_most=100) == 75
    for _ in range(10):
        lengths.observe("a", 7)
    assert lengths.expected("b", at_least=0, at_most=100) == 7
    assert lengths.expected("b", at_least=7, at_most=100) == 54  # nobody got as far


def test_old_lengths_are_forgotten() -> None:
    lengths = Lengths()
    for length in [500] * 600 + [10] * 600:
        lengths.observe("a", length)
    assert lengths.expected("a", at_least=0, at_most=1000) == 10


@pytest.mark.parametrize(
    ("sequences", "peak"),
    [
        ([(10, 5)], 15),
        ([(10, 5), (10, 5)], 30),  # both end at once
        ([(10, 1), (10, 5)], 22),  # the first ends at 11 + 11, the second alone at 15
        ([(2, 100), (50, 1)], 102),  # 51 + 3 at the first end, 102 at the second
    ],
)
def test_memory_peaks_just_before_somebody_ends(sequences: list[tuple[int, int]], peak: int) -> None:
    tokens, remaining = np.array(sequences).T
    assert peak_blocks(tokens, remaining, 1) == peak


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8), st.integers(1, 8))
def test_the_peak_is_never_less_than_what_happens(sequences: list[tuple[int, int]], block_size: int) -> None:
    tokens, remaining = np.array(sequences).T
    happens = max(
        sum(-(-(held + step) // block_size) for held, left in sequences if left >= step)
        for step in range(1, max(remaining) + 1)
    )
    bound = peak_blocks(tokens, remaining, block_size)
    assert happens <= bound <= happens + len(sequences)
    if block_size == 1:
        assert bound == happens
