"""The running batch as a struct of arrays: a row for each slot.

What a step needs of a thousand sequences is then a handful of array operations; what happens seldom, a new block or a
new sequence, touches a row.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from engine.sequence import Sequence
from engine.step import Ints

Objects = npt.NDArray[np.object_]

_FIRST_WIDTH = 16
"""Blocks that a row has room for at first; the table grows by doubling."""


class Table:
    """Rows of slots. A free row's content means nothing."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))  # a heap: the lowest first, so that few rows stay warm
        self.block_ids: Ints = np.zeros((num_slots, _FIRST_WIDTH), dtype=np.int32)
        """[slots, W] Position p lies in block_ids[slot, p // block_size]."""
        self.num_blocks: Ints = np.zeros(num_slots, dtype=np.int32)
        self.num_computed: Ints = np.zeros(num_slots, dtype=np.int32)
        """Tokens whose keys and values are in the cache."""
        self.num_tokens: Ints = np.zeros(num_slots, dtype=np.int32)
        self.last_ids: Ints = np.zeros(num_slots, dtype=np.int32)
        """The newest token of each."""
        self.ends: Ints = np.zeros(num_slots, dtype=np.int32)
        """Tokens at which each is expected to end."""
        self.ranks: Ints = np.zeros(num_slots, dtype=np.int32)
        """The tier that the policy sees."""
        self.joined_steps: npt.NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        """The step in which each got its slot."""
        self.sequences: Objects = np.full(num_slots, None, dtype=object)
        self.request_ids: Objects = np.full(num_slots, None, dtype=object)
        self.samplings: Objects = np.full(num_slots, None, dtype=object)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter(self, sequence: Sequence) -> int:
        """Take a free row for a sequence, without blocks."""
        slot = sequence.slot = heapq.heappop(self._free)
        self.num_blocks[slot] = self.num_computed[slot] = 0
        self.num_tokens[slot] = sequence.num_tokens
        self.last_ids[slot] = sequence.token_ids[-1]
        self.ranks[slot] = sequence.rank
        self.sequences[slot] = sequence
        self.request_ids[slot] = sequence.request.id
        self.samplings[slot] = sequence.request.sampling
        return slot

    def leave(self, sequence: Sequence) -> None:
        """Give its row back."""
        for objects in (self.sequences, self.request_ids, self.samplings):
            objects[sequence.slot] = None
        heapq.heappush(self._free, sequence.slot)
        sequence.slot = -1

    def append(self, slot: int, block_ids: Items[int]) -> None:
        """More blocks for a row."""
        begin = int(self.num_blocks[slot])
        end = begin + len(block_ids)
        while end > self.block_ids.shape[1]:
            self.block_ids = np.concatenate([self.block_ids, np.zeros_like(self.block_ids)], axis=1)
        self.block_ids[slot, begin:end] = block_ids
        self.num_blocks[slot] = end

    def blocks(self, slot: int) -> list[int]:
        """A row's blocks."""
        ids: list[int] = self.block_ids[slot, : self.num_blocks[slot]].tolist()
        return ids

    def tables(self, rows: npt.NDArray[np.int64]) -> Ints:
        """[rows, W] A copy of these rows, as wide as the longest of them."""
        width = int(self.num_blocks[rows].max(initial=1))
        return self.block_ids[rows, :width]
