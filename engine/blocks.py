"""The pool of KV blocks: which are free, which are referenced, and which lie side by side.

A sequence whose blocks have consecutive ids is read as one slice of the cache instead of being gathered, so the
pool keeps free blocks as runs of neighbours and hands out neighbours where it can. It never refuses a block for that:
a fragmented pool serves the same requests, only less neatly.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

_HEAP_SLACK = 64
"""Stale heap entries that are always tolerated, so that a small pool is not compacted at every step."""


class BlockPool:
    """Hands out block ids 0 … num_blocks - 1, counts their references, and takes them back.

    Free ids are kept as maximal runs, found from either end in O(1); the largest one is the top of a heap whose
    outdated entries are dropped when they surface. All operations are O(log runs) amortised per run they touch.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool has at least one block")
        self.num_blocks = num_blocks
        self._num_free = 0
        self._references = [0] * num_blocks
        self._length_at: dict[int, int] = {}  # first id of a free run -> its length
        self._start_of: dict[int, int] = {}  # first id behind a free run -> its first id
        self._largest: list[tuple[int, int]] = []  # heap of (-length, first id); may hold runs that are gone
        self._add_run(0, num_blocks)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self._num_free

    def allocate(self, count: int, *, after: int | None = None, expected: int = 0) -> tuple[int, ...] | None:
        """Reference `count` free blocks, neighbours where possible; None, and nothing taken, where too few are free.

        after     the caller's last block: the ids right behind it are taken first
        expected  blocks the sequence may come to hold beyond `after`, these included: that much room is left
                  behind the first of them, if a free run has it
        """
        if count > self._num_free:
            return None
        taken: list[int] = []
        if after is not None and (run_length := self._length_at.get(after + 1)):
            taken.extend(self._take(after + 1, 0, min(count, run_length)))
        while len(taken) < count:
            missing = count - len(taken)
            taken.extend(self._take_from_largest(missing, room=max(missing, expected - len(taken))))
        return tuple(taken)

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each of these blocks. Raises ValueError for a block that has none."""
        for block_id in block_ids:
            if not self._references[block_id]:
                raise ValueError(f"block {block_id} is free and cannot be shared")
            self._references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each of these blocks; a block without references is free at once.

        Raises ValueError for a block that has none.
        """
        start = length = 0
        for block_id in block_ids:
            if not self._references[block_id]:
                raise ValueError(f"block {block_id} is freed twice")
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if length and block_id == start + length:
                length += 1
                continue
            self._give_back(start, length)
            start, length = block_id, 1
        self._give_back(start, length)

    def check(self, tables: Iterable[Iterable[int]] | None = None) -> None:
        """Assert that the books agree: runs, heap and references; and with `tables`, that these are all references."""
        free = [block_id for start, length in self._length_at.items() for block_id in range(start, start + length)]
        unreferenced = [block_id for block_id, count in enumerate(self._references) if count == 0]
        assert sorted(free) == unreferenced, "free runs and unreferenced blocks differ"
        assert len(free) == self._num_free, "the count of free blocks is wrong"
        assert self._start_of == {start + length: start for start, length in self._length_at.items()}
        assert not self._length_at.keys() & self._start_of.keys(), "two neighbouring runs were not joined"
        missing = {(-length, start) for start, length in self._length_at.items()} - set(self._largest)
        assert not missing, f"runs missing from the heap: {missing}"
        if tables is not None:
            counted = Counter(block_id for table in tables for block_id in table)
            referenced = {block_id: count for block_id, count in enumerate(self._references) if count}
            assert counted == referenced, "references and block tables differ"

    def _take_from_largest(self, count: int, room: int) -> range:
        """Take up to `count` neighbours out of the largest free run, with room to grow behind the first of them.

        The sequence that ends before the run may want to grow into it, so the newcomer starts as far back as its own
        room allows; where the run is shorter than that, the two share it:

            room ≤ length   [ left to the neighbour   | count … room ]
            room > length   [ neighbour's half | newcomer's half     ]
        """
        start, length = self._find_largest()
        count = min(count, length)
        offset = length - room if room <= length else min(length // 2, length - count)
        return self._take(start, offset, count)

    def _find_largest(self) -> tuple[int, int]:
        """First id and length of the largest free run; there must be one."""
        while True:
            negative_length, start = self._largest[0]
            if self._length_at.get(start) == -negative_length:
                return start, -negative_length
            heapq.heappop(self._largest)

    def _take(self, start: int, offset: int, count: int) -> range:
        """Reference `count` blocks of the run at `start`, `offset` behind its beginning."""
        length = self._length_at.pop(start)
        del self._start_of[start + length]
        self._num_free -= length
        first = start + offset
        self._add_run(start, offset)
        self._add_run(first + count, length - offset - count)
        for block_id in range(first, first + count):
            self._references[block_id] = 1
        return range(first, first + count)

    def _give_back(self, start: int, length: int) -> None:
        """Make `length` blocks from `start` on a free run, joined with the free runs on either side."""
        if not length:
            return
        if (left := self._start_of.pop(start, None)) is not None:
            left_length = self._length_at.pop(left)
            self._num_free -= left_length
            start, length = left, left_length + length
        if right_length := self._length_at.pop(start + length, None):
            del self._start_of[start + length + right_length]
            self._num_free -= right_length
            length += right_length
        self._add_run(start, length)

    def _add_run(self, start: int, length: int) -> None:
        if not length:
            return
        self._num_free += length
        self._length_at[start] = length
        self._start_of[start + length] = start
        heapq.heappush(self._largest, (-length, start))
        if len(self._largest) > 4 * len(self._length_at) + _HEAP_SLACK:
            self._largest = [(-run_length, run_start) for run_start, run_length in self._length_at.items()]
            heapq.heapify(self._largest)
