"""How long outputs get, by kind of job, and the memory that running sequences will come to need."""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque

import numpy as np
import numpy.typing as npt

from engine.step import Ints

_REMEMBERED = 512
"""Lengths of a kind that are kept: the newest."""
_KINDS = 1024
"""Kinds that are kept: those seen last."""
_ALL = "*"
"""The kind that all are of."""
_ENOUGH = 8
"""With fewer lengths nothing is known of a kind."""


class Lengths:
    """The distribution of output lengths of each kind of job, in tokens."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[str, tuple[deque[int], list[int]]] = OrderedDict()  # as they came, and sorted

    def observe(self, kind: str, num_tokens: int) -> None:
        """Note a finished output."""
        for name in {kind, _ALL}:
            self._note(name, num_tokens)

    def _note(self, kind: str, num_tokens: int) -> None:
        recent, ordered = self._kinds.setdefault(kind, (deque(), []))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        recent.append(num_tokens)
        bisect.insort(ordered, num_tokens)
        if len(recent) > _REMEMBERED:
            del ordered[bisect.bisect_left(ordered, recent.popleft())]

    def expected(self, kind: str, *, at_least: int, at_most: int, quantile: float = 0.9) -> int:
        """The quantile among the outputs of the kind that got longer than `at_least`, up to at_most.

        Of a kind that is new, those of all kinds tell; where none do, half of what is left is expected: too much would
        keep slots empty, too little costs a recomputation.
        """
        for name in (kind, _ALL):
            _, ordered = self._kinds.get(name, ((), ()))
            longer = bisect.bisect_right(ordered, at_least)
            if len(ordered) - longer >= _ENOUGH:
                index = longer + int(quantile * (len(ordered) - longer - 1))
                return min(ordered[index], at_most)
        return at_least + -(-(at_most - at_least) // 2)


def longest_first(remaining: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[N] The order in which peak_blocks takes sequences."""
    return np.argsort(-remaining, kind="stable")


def peak_blocks(tokens: Ints, remaining: npt.NDArray[np.int64], block_size: int) -> int:
    """The most blocks that sequences hold at once, if each of them ends after its remaining tokens.

    tokens     [N] tokens of each now, less those in blocks that one before it holds too, longest first
    remaining  [N] tokens that each will still generate, above 0

    Memory peaks just before somebody ends. With the longest to go first, those that are left at that moment are a
    beginning of the line, and each has grown by the same number of tokens. A block that several share counts once, with
    the first of them, who stays as long as any:

        peak = max over i of Σ (j ≤ i) blocks(tokens[j] + remaining[i])

    Whole blocks are counted as (tokens + block_size - 1) / block_size, which is never less.
    Source: Gong et al., Past-Future scheduler, ASPLOS 2025, eq. 3.
    """
    order = longest_first(remaining)
    left = remaining[order].astype(np.int64)
    held = np.cumsum(tokens[order].astype(np.int64) + block_size - 1)
    most = (held + left * np.arange(1, len(order) + 1)).max(initial=0)
    return int(most // block_size)
