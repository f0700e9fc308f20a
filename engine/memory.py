"""The KV cache as sequences use it: blocks for their tokens, common beginnings shared, host memory to swap to.

A published block, one whose content is known by its digest, is never written again: who would have to gets a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.blocks import BlockPool
from engine.digests import Digests
from engine.limits import Limits
from engine.sequence import Sequence, State
from engine.step import Moves
from engine.table import Table


@dataclass(frozen=True, slots=True)
class Match:
    """What of a waiting sequence needs no computing."""

    num_tokens: int = 0
    """Tokens whose keys and values are there."""
    block_ids: tuple[int, ...] = ()
    """Blocks of the cache that it will share."""
    copied_id: int | None = None
    """The block behind them that holds the rest of these tokens, and into which it will have to write: to be copied."""
    num_needed: int = 0
    """Free blocks that it takes to join: new ones, and cached ones that nobody refers to."""
    maker: Sequence | None = None
    """Who is computing the next block that it could share."""


class Memory:
    """Blocks of one pool, and of host memory, in the hands of sequences."""

    def __init__(self, limits: Limits, table: Table, *, secret: bytes) -> None:
        self._limits = limits
        self._table = table
        self._pool = BlockPool(limits.num_blocks)
        self._host = BlockPool(limits.num_host_blocks) if limits.num_host_blocks else None
        self._digests = Digests(secret, limits.block_size)
        self._makers: dict[bytes, Sequence] = {}  # blocks that are being computed, by digest
        self._swaps_out: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []
        self._swaps_in: list[tuple[int, int]] = []
        self._held: list[int] = []  # blocks that the step copies from
        self._held_host: list[int] = []  # host blocks that the step reads

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        return self._pool.num_used

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    def num_own(self, sequence: Sequence) -> int:
        """Blocks that are free once a running sequence gives up its own."""
        return len(self._pool.own(self._table.blocks(sequence.slot)))

    def is_shared(self, rows: npt.NDArray[np.int64]) -> bool:
        """Whether any two sequences, of all that run, hold the same block."""
        return int(self._table.num_blocks[rows].sum()) > self._pool.num_used

    def num_repeated(
        self, rows: npt.NDArray[np.int64], found: tuple[int, ...], order: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        """Blocks of each that one before it in an order holds too.

        rows   [N] running sequences
        found  blocks that one more would share with them
        order  [N + 1] of these, and of the one more: N
        """
        counts = np.append(self._table.num_blocks[rows], len(found))
        tables = np.zeros((len(counts), int(counts.max())), dtype=np.int32)  # [N + 1, W]
        known = self._table.tables(rows)
        tables[:-1, : known.shape[1]] = known
        tables[-1, : len(found)] = found
        tables, counts = tables[order], counts[order]
        ids = tables[np.arange(tables.shape[1]) < counts[:, None]]  # [B], those of the first in order first
        holders = np.repeat(np.arange(len(counts)), counts)  # [B]
        first = np.zeros(self.num_blocks, dtype=np.int64)
        first[ids[::-1]] = holders[::-1]  # what is written last stays
        repeated = np.empty(len(counts), dtype=np.int32)
        repeated[order] = np.bincount(holders[first[ids] != holders], minlength=len(counts))
        return repeated

    def match(self, sequence: Sequence) -> Match:
        """What a waiting sequence would find now."""
        total = self._limits.blocks_for(sequence.num_tokens)
        if sequence.host_ids or not self._limits.prefix_cache:
            return Match(sequence.num_swapped, num_needed=total)
        self._name_blocks(sequence)
        found: list[int] = []
        for digest in sequence.digests:
            if (block_id := self._pool.find(digest)) is None:
                break
            found.append(block_id)
        num_idle = self._pool.count_idle(found)
        num_tokens = len(found) * self._limits.block_size
        copied_id = None
        if num_tokens == sequence.num_tokens:  # all is there, but the last token is computed again to sample behind it
            copied_id = found.pop()
            num_tokens -= 1
        ahead = sequence.digests[len(found)] if len(found) < len(sequence.digests) else None
        return Match(
            num_tokens,
            block_ids=tuple(found),
            copied_id=copied_id,
            num_needed=total - len(found) + num_idle,
            maker=None if ahead is None or copied_id is not None else self._makers.get(ahead),
        )

    def join(self, sequence: Sequence, match: Match, *, expected_blocks: int) -> None:
        """Give a sequence with a slot blocks for all its tokens; match.num_needed of them are free."""
        slot = sequence.slot
        self._pool.retain(match.block_ids)
        if match.copied_id is not None:
            self._pool.retain([match.copied_id])
            self._held.append(match.copied_id)
        count = self._limits.blocks_for(sequence.num_tokens) - len(match.block_ids)
        after = match.block_ids[-1] if match.block_ids else None
        new = self._pool.allocate(count, after=after, expected=expected_blocks)
        assert new is not None, "the blocks that were counted are not there"
        if match.copied_id is not None:
            self._copies.append((match.copied_id, new[0]))
        if sequence.host_ids:
            self._swaps_in += zip(sequence.host_ids, new, strict=False)
            self._held_host += sequence.host_ids
            sequence.host_ids, sequence.num_swapped = (), 0
        self._table.append(slot, [*match.block_ids, *new])
        self._table.num_computed[slot] = match.num_tokens
        for digest in sequence.digests[match.num_tokens // self._limits.block_size :]:
            self._makers.setdefault(digest, sequence)

    def grow(self, sequence: Sequence, *, expected_blocks: int) -> bool:
        """One more block for a running sequence; False where none is free."""
        slot = sequence.slot
        last = int(self._table.block_ids[slot, self._table.num_blocks[slot] - 1])
        blocks = self._pool.allocate(1, after=last, expected=expected_blocks)
        if blocks is None:
            return False
        self._table.append(slot, blocks)
        return True

    def publish(self, sequence: Sequence, num_before: int) -> None:
        """Note the blocks that became full since so many of the sequence's tokens were computed."""
        if not self._limits.prefix_cache:
            return
        size, slot = self._limits.block_size, sequence.slot
        full = int(self._table.num_computed[slot]) // size
        self._name_blocks(sequence)
        for index in range(num_before // size, full):
            digest = sequence.digests[index]
            self._pool.publish(int(self._table.block_ids[slot, index]), digest)
            if self._makers.get(digest) is sequence:
                del self._makers[digest]

    def swap_out(self, sequence: Sequence) -> bool:
        """Have a running sequence's computed blocks copied to host memory; False where that is full."""
        num_computed = int(self._table.num_computed[sequence.slot])
        count = self._limits.blocks_for(num_computed)
        host_ids = self._host.allocate(count) if self._host else None
        if not host_ids:
            return False
        self._swaps_out += zip(self._table.blocks(sequence.slot), host_ids, strict=False)
        sequence.host_ids, sequence.num_swapped = host_ids, num_computed
        return True

    def release(self, sequence: Sequence, *, is_forgotten: bool = False) -> None:
        """Take a running sequence's blocks back. Published ones stay to be found.

        is_forgotten  unless nobody else holds them
        """
        blocks = self._table.blocks(sequence.slot)
        own = self._pool.own(blocks)
        for digest in sequence.digests:
            if self._makers.get(digest) is sequence:
                del self._makers[digest]
        self._pool.release(blocks)
        if is_forgotten:
            self._pool.forget(own)

    def release_host(self, sequence: Sequence) -> None:
        """Take back the host memory of a sequence that ended while it waited."""
        if self._host and sequence.host_ids:
            self._host.release(sequence.host_ids)
            sequence.host_ids, sequence.num_swapped = (), 0

    def take_moves(self) -> Moves:
        """What the step has to move before it computes."""
        moves = Moves(tuple(self._swaps_out), tuple(self._copies), tuple(self._swaps_in))
        self._swaps_out, self._copies, self._swaps_in = [], [], []
        return moves

    def settle(self) -> None:
        """The step's moves were made: what they read may be written again."""
        self._pool.release(self._held)
        self._held = []
        if self._host and self._held_host:
            self._host.release(self._held_host)
            self._held_host = []

    def check(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Assert that the books agree; for tests, between steps."""
        self._pool.check([self._table.blocks(sequence.slot) for sequence in running] + [self._held])
        if self._host:
            self._host.check([sequence.host_ids for sequence in waiting] + [self._held_host])
        assert all(maker.state is State.PREFILLING for maker in self._makers.values())

    def _name_blocks(self, sequence: Sequence) -> None:
        if len(sequence.digests) < sequence.num_tokens // self._limits.block_size:
            self._digests.extend(sequence.digests, sequence.token_ids, sequence.request.tenant)
