"""The pool of KV blocks: which are free, which are referenced, which lie side by side, and whose content is known.

A sequence whose blocks have consecutive ids is read as one slice of the cache instead of being gathered, so the
pool keeps blank blocks as runs of neighbours and hands out neighbours where it can. It never refuses a block for that:
a fragmented pool serves the same requests, only less neatly.

A block whose content is published under a digest stays findable after its last reference, until its place is needed:

            allocate                release, published
    BLANK ───────────▶ REFERENCED ─────────────────────▶ CACHED
      ▲                   │    ▲                         │    │
      ├──── release ──────┘    └──────── retain ─────────┘    │
      └───────────── evicted by allocate, or forget ──────────┘

Blank and cached blocks are both free: either can be had for the asking.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import islice

_HEAP_SLACK = 64
"""Stale heap entries that are always tolerated, so that a small pool is not compacted at every step."""


class BlockPool:
    """Hands out block ids 0 … num_blocks - 1, counts their references, and takes them back.

    Blank ids are kept as maximal runs, found from either end in O(1); the largest one is the top of a heap whose
    outdated entries are dropped when they surface. All operations are O(log runs) amortised per run they touch.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool has at least one block")
        self.num_blocks = num_blocks
        self._num_blank = 0
        self._references = [0] * num_blocks
        self._length_at: dict[int, int] = {}  # first id of a blank run -> its length
        self._start_of: dict[int, int] = {}  # first id behind a blank run -> its first id
        self._largest: list[tuple[int, int]] = []  # heap of (-length, first id); may hold runs that are gone
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._digest_of: dict[int, bytes] = {}  # of published blocks, referenced or cached
        self._block_of: dict[bytes, int] = {}  # the same, the other way
        self._add_run(0, num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks without a reference, blank or cached: that many can be allocated."""
        return self._num_blank + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks that can still be found by their digests."""
        return len(self._cached)

    def allocate(self, count: int, *, after: int | None = None, expected: int = 0) -> tuple[int, ...] | None:
        """Reference `count` free blocks, neighbours where possible; None, and nothing taken, where too few are free.

        Cached blocks are evicted only where the blank ones do not suffice, no more than are missing, and the least
        recently used first.

        after     the caller's last block: the ids right behind it are taken first
        expected  blocks the sequence may come to hold beyond `after`, these included: that much room is left
                  behind the first of them, if a blank run has it
        """
        if count > self.num_free:
            return None
        if (num_missing := count - self._num_blank) > 0:
            self.forget(sorted(islice(self._cached, num_missing)))  # sorted, so that neighbours return as one run
        taken: list[int] = []
        if after is not None and (run_length := self._length_at.get(after + 1)):
            taken.extend(self._take(after + 1, 0, min(count, run_length)))
        while len(taken) < count:
            missing = count - len(taken)
            taken.extend(self._take_from_largest(missing, room=max(missing, expected - len(taken))))
        return tuple(taken)

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each of these blocks, which brings cached ones back into use.

        Raises ValueError for a blank block.
        """
        for block_id in block_ids:
            if not self._references[block_id]:
                if block_id not in self._cached:
                    raise ValueError(f"block {block_id} is blank and cannot be shared")
                del self._cached[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each of these blocks; a block without references is free at once.

        Published ones become the most recently used of the cached blocks, the first of them last of all: given a table
        in its order, its tail is evicted before its head, which more prompts have in common and without which the tail
        is never found. Raises ValueError for a block that has no reference.
        """
        unpublished: list[int] = []
        published: list[int] = []
        for block_id in block_ids:
            if not self._references[block_id]:
                raise ValueError(f"block {block_id} is freed twice")
            self._references[block_id] -= 1
            if not self._references[block_id]:
                (published if block_id in self._digest_of else unpublished).append(block_id)
        self._cached.update(dict.fromkeys(reversed(published)))
        self._make_blank(unpublished)

    def publish(self, block_id: int, digest: bytes) -> None:
        """Let a block be found by the digest of its content, which must not change from now on.

        No effect where the block has a digest, or the digest names another block: the first copy is the one to share.
        Raises ValueError for a blank block.
        """
        if block_id in self._digest_of or digest in self._block_of:
            return
        if not self._references[block_id]:
            raise ValueError(f"block {block_id} is blank and has no content to publish")
        self._digest_of[block_id] = digest
        self._block_of[digest] = block_id

    def find(self, digest: bytes) -> int | None:
        """The block with this content, or None. Retain it before the next allocate, which may evict it."""
        return self._block_of.get(digest)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Drop the digests of these blocks, where they have one; cached ones become blank."""
        unpublished: list[int] = []
        for block_id in block_ids:
            if (digest := self._digest_of.pop(block_id, None)) is None:
                continue
            del self._block_of[digest]
            if block_id in self._cached:
                del self._cached[block_id]
                unpublished.append(block_id)
        self._make_blank(unpublished)

    def count_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks have no reference: so many fewer are free once all of them are retained."""
        return sum(not self._references[block_id] for block_id in set(block_ids))

    def own(self, block_ids: Iterable[int]) -> list[int]:
        """Those of these blocks that have a single reference: they are free once that one is dropped."""
        return [block_id for block_id in block_ids if self._references[block_id] == 1]

    def check(self, tables: Iterable[Iterable[int]] | None = None) -> None:
        """Assert that the books agree: runs, heap, cache, digests and references.

        tables  where given, they hold all references; an idle pool has none: check([])
        """
        blank = [block_id for start, length in self._length_at.items() for block_id in range(start, start + length)]
        unreferenced = [block_id for block_id, count in enumerate(self._references) if count == 0]
        assert sorted([*blank, *self._cached]) == unreferenced, "blank, cached and referenced blocks are no partition"
        assert len(blank) == self._num_blank, "the count of blank blocks is wrong"
        assert self._digest_of.keys() >= self._cached.keys(), "a cached block has no digest"
        assert self._digest_of.keys().isdisjoint(blank), "a blank block has a digest"
        assert self._block_of == {digest: block_id for block_id, digest in self._digest_of.items()}
        assert len(self._block_of) == len(self._digest_of), "two blocks have one digest"
        assert self._start_of == {start + length: start for start, length in self._length_at.items()}
        assert not self._length_at.keys() & self._start_of.keys(), "two neighbouring runs were not joined"
        missing = {(-length, start) for start, length in self._length_at.items()} - set(self._largest)
        assert not missing, f"runs missing from the heap: {missing}"
        if tables is not None:
            counted = Counter(block_id for table in tables for block_id in table)
            referenced = {block_id: count for block_id, count in enumerate(self._references) if count}
            assert counted == referenced, "references and block tables differ"

    def _take_from_largest(self, count: int, room: int) -> range:
        """Take up to `count` neighbours out of the largest blank run, with room to grow behind the first of them.

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
        """First id and length of the largest blank run; there must be one."""
        while True:
            negative_length, start = self._largest[0]
            if self._length_at.get(start) == -negative_length:
                return start, -negative_length
            heapq.heappop(self._largest)

    def _take(self, start: int, offset: int, count: int) -> range:
        """Reference `count` blocks of the run at `start`, `offset` behind its beginning."""
        length = self._length_at.pop(start)
        del self._start_of[start + length]
        self._num_blank -= length
        first = start + offset
        self._add_run(start, offset)
        self._add_run(first + count, length - offset - count)
        for block_id in range(first, first + count):
            self._references[block_id] = 1
        return range(first, first + count)

    def _make_blank(self, block_ids: Iterable[int]) -> None:
        """Give back each stretch of ascending neighbours as one run."""
        start = length = 0
        for block_id in block_ids:
            if length and block_id == start + length:
                length += 1
                continue
            self._give_back(start, length)
            start, length = block_id, 1
        self._give_back(start, length)

    def _give_back(self, start: int, length: int) -> None:
        """Make `length` blocks from `start` on a blank run, joined with the blank runs on either side."""
        if not length:
            return
        if (left := self._start_of.pop(start, None)) is not None:
            left_length = self._length_at.pop(left)
            self._num_blank -= left_length
            start, length = left, left_length + length
        if right_length := self._length_at.pop(start + length, None):
            del self._start_of[start + length + right_length]
            self._num_blank -= right_length
            length += right_length
        self._add_run(start, length)

    def _add_run(self, start: int, length: int) -> None:
        if not length:
            return
        self._num_blank += length
        self._length_at[start] = length
        self._start_of[start + length] = start
        heapq.heappush(self._largest, (-length, start))
        if len(self._largest) > 4 * len(self._length_at) + _HEAP_SLACK:
            self._largest = [(-run_length, run_start) for run_start, run_length in self._length_at.items()]
            heapq.heapify(self._largest)
