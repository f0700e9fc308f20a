"""Which tokens a line has, and how often each was generated: kept up token by token, so that no step counts a line."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.step import Ints

_FIRST_LENGTH = 64
"""Different tokens that there is room for at first; the arrays grow by doubling."""


class TokenCounts:
    """The different tokens of one line, in the order in which they came."""

    def __init__(self, prompt_ids: Iterable[int], generated_ids: Iterable[int]) -> None:
        self._place_of: dict[int, int] = {}
        self._ids: Ints = np.zeros(_FIRST_LENGTH, dtype=np.int32)
        self._counts: Ints = np.zeros(_FIRST_LENGTH, dtype=np.int32)
        for token_id in prompt_ids:
            self._place(token_id)
        for token_id in generated_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """A token was generated."""
        place = self._place(token_id)  # first: the arrays may be new ones behind it
        self._counts[place] += 1

    @property
    def ids(self) -> Ints:
        """[U] A copy: each token once."""
        return self._ids[: len(self._place_of)].copy()

    @property
    def counts(self) -> Ints:
        """[U] A copy: how often each was generated; 0 for those of the prompt alone."""
        return self._counts[: len(self._place_of)].copy()

    def _place(self, token_id: int) -> int:
        place = self._place_of.setdefault(token_id, len(self._place_of))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        return place
