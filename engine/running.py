"""The running batch: who has a slot and blocks of the cache, and what a step needs of them.

A sequence joins to have its tokens prefilled, decodes from its last one on, and leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain, compress

import numpy as np
import numpy.typing as npt

from engine.cost import Work
from engine.limits import Limits
from engine.memory import Match, Memory
from engine.request import Sampling
from engine.sequence import Sequence, State
from engine.step import StepPlan
from engine.table import Table


@dataclass(slots=True)
class Piece:
    """A part of a prompt that the step computes."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.num_tokens

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.start : self.end]

    @property
    def sampling(self) -> Sampling | None:
        return self.sequence.request.sampling if self.is_last else None


@dataclass(frozen=True, slots=True)
class Decodes:
    """The sequences that decode and what a plan needs of them, made anew when one comes or goes."""

    sequences: tuple[Sequence, ...]
    rows: npt.NDArray[np.int64]
    request_ids: tuple[str, ...]
    samplings: tuple[Sampling, ...]
    with_past: tuple[int, ...]
    """Those whose sampling asks for their past."""


NO_DECODES = Decodes((), np.zeros(0, dtype=np.int64), (), (), ())


class RunningBatch:
    """Sequences that run, as rows of a table and as holders of blocks."""

    def __init__(self, limits: Limits, *, secret: bytes) -> None:
        """secret keys the names of cached blocks."""
        self._limits = limits
        self.table = Table(limits.max_num_seqs)
        self.memory = Memory(limits, self.table, secret=secret)
        self.prefilling: list[Sequence] = []
        """In the order in which they joined."""
        self._decoding: dict[int, Sequence] = {}  # by slot, in the order in which they began to decode
        self._decodes: Decodes | None = None  # of _decoding, until it changes
        self._rows: npt.NDArray[np.int64] | None = None  # of all, until they change
        self.by_rank: Counter[int] = Counter()
        """Sequences by the rank of their request."""
        self.by_queue: Counter[Hashable] = Counter()
        self.by_tenant: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._decoding) + len(self.prefilling)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._decoding.values()
        yield from self.prefilling

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The slots of all, in the order of iteration."""
        if self._rows is None:
            slots = chain(self._decoding, [sequence.slot for sequence in self.prefilling])
            self._rows = np.fromiter(slots, dtype=np.int64, count=len(self))
        return self._rows

    @property
    def _decode_rows(self) -> npt.NDArray[np.int64]:
        return np.fromiter(self._decoding, dtype=np.int64, count=len(self._decoding))

    @property
    def decodes(self) -> Decodes:
        if self._decodes is None:
            table, rows = self.table, self._decode_rows
            samplings = tuple(table.samplings[rows].tolist())
            self._decodes = Decodes(
                sequences=tuple(table.sequences[rows].tolist()),
                rows=rows,
                request_ids=tuple(table.request_ids[rows].tolist()),
                samplings=samplings,
                with_past=tuple(index for index, sampling in enumerate(samplings) if sampling.needs_past),
            )
        return self._decodes

    @property
    def decode_work(self) -> Work:
        rows = self._decode_rows
        return Work(num_decodes=len(rows), kv_read=int(self.table.num_tokens[rows].sum()))

    # Who comes and goes.

    def join(self, sequence: Sequence, match: Match, *, expected_end: int, step: int) -> None:
        """Give a slot, and blocks for all its tokens, to a sequence; both are there.

        match         what of it needs no computing
        expected_end  tokens at which it is expected to end
        step          the first one that it takes part in
        """
        slot = self.table.enter(sequence)
        self.table.ends[slot] = expected_end
        self.table.joined_steps[slot] = step
        self.memory.join(sequence, match, expected_blocks=self._room_behind(sequence))
        sequence.state = State.PREFILLING
        sequence.num_joined = sequence.num_tokens
        self.prefilling.append(sequence)
        self._count(sequence, 1)

    def leave(self, sequence: Sequence, *, is_forgotten: bool = False) -> None:
        """Take slot and blocks back; is_forgotten: what it computed is not to be found in the prefix cache."""
        if sequence.state is State.DECODING:
            del self._decoding[sequence.slot]
            self._decodes = None
        else:
            self.prefilling.remove(sequence)
        self.memory.release(sequence, is_forgotten=is_forgotten)
        self.table.leave(sequence)
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, change: int) -> None:
        self._rows = None
        request = sequence.request
        self.by_rank[request.rank] += change
        for counter, key in ((self.by_queue, sequence.queue), (self.by_tenant, (request.rank, request.tenant))):
            counter[key] += change
            if not counter[key]:
                del counter[key]  # tenants come and go for as long as the engine lives

    # Blocks for what decodes.

    def out_of_room(self) -> list[Sequence]:
        """Those that decode and have no block yet for their newest token."""
        rows = self._decode_rows
        held = self.table.num_blocks[rows] * self._limits.block_size
        return [self._decoding[slot] for slot in rows[self.table.num_computed[rows] == held].tolist()]

    def grow(self, sequence: Sequence) -> bool:
        """One more block for a sequence; False where none is free."""
        return self.memory.grow(sequence, expected_blocks=self._room_behind(sequence))

    def _room_behind(self, sequence: Sequence) -> int:
        """Blocks that the sequence may still take, for the pool to leave room behind it.

        Its last token is never computed. No more than a slot's share of the pool: most end before their limit, and
        room that is left behind one is missing to another.
        """
        held = int(self.table.num_blocks[sequence.slot])
        return min(
            self._limits.blocks_for(sequence.token_limit - 1) - held,
            self.memory.num_blocks // self._limits.max_num_seqs,
        )

    # A step.

    def plan(self, number: int, decodes: Decodes, pieces: list[Piece]) -> StepPlan:
        """The arrays of a step that computes these."""
        slots = np.array([piece.sequence.slot for piece in pieces], dtype=np.int64)
        rows = np.concatenate([decodes.rows, slots])
        tokens = [np.array(piece.token_ids, dtype=np.int32) for piece in pieces]
        counts = np.ones(len(rows), dtype=np.int32)
        counts[len(decodes.rows) :] = [piece.count for piece in pieces]
        pasts = {index: decodes.sequences[index].past for index in decodes.with_past}
        for index, piece in enumerate(pieces, start=len(decodes.rows)):
            if piece.sampling is not None and piece.sampling.needs_past:
                pasts[index] = piece.sequence.past
        return StepPlan(
            number=number,
            block_size=self._limits.block_size,
            num_decodes=len(decodes.rows),
            request_ids=decodes.request_ids + tuple(piece.sequence.request.id for piece in pieces),
            samplings=decodes.samplings + tuple(piece.sampling for piece in pieces),
            starts=self.table.num_computed[rows],
            counts=counts,
            token_ids=np.concatenate([self.table.last_ids[decodes.rows], *tokens]),
            tables=self.table.tables(rows),
            moves=self.memory.take_moves(),
            pasts=pasts,
        )

    def commit_decodes(self, decodes: Decodes, sampled_ids: Items[int]) -> list[tuple[Sequence, int]]:
        """Book that the newest token of each is computed. Returns who gained which; not those that ended meanwhile."""
        table = self.table
        rows, ids = decodes.rows, np.asarray(sampled_ids, dtype=np.int32)
        gained = list(zip(decodes.sequences, sampled_ids, strict=True))
        if decodes is not self._decodes:  # somebody left
            is_live = np.array([sequence.state is not State.ENDED for sequence in decodes.sequences], dtype=bool)
            rows, ids = rows[is_live], ids[is_live]
            gained = list(compress(gained, is_live))
        table.num_computed[rows] += 1
        for slot in rows[table.num_computed[rows] % self._limits.block_size == 0].tolist():
            self.memory.publish(self._decoding[slot], int(table.num_computed[slot]) - 1)
        table.num_tokens[rows] += 1
        table.last_ids[rows] = ids
        return gained

    def commit_piece(self, piece: Piece, token_id: int | None) -> None:
        """Book that a piece is computed; who gained a token behind it decodes from now on."""
        sequence, slot = piece.sequence, piece.sequence.slot
        self.table.num_computed[slot] = piece.end
        self.memory.publish(sequence, piece.start)
        if token_id is not None:
            self.prefilling.remove(sequence)
            self._decoding[slot] = sequence
            self._decodes = self._rows = None
            sequence.state = State.DECODING
            self.table.num_tokens[slot] += 1
            self.table.last_ids[slot] = token_id

    def check(self, waiting: list[Sequence]) -> None:
        """Assert that slots, blocks and counts agree; for tests, between steps.

        waiting  all that have no slot
        """
        running = list(self)
        self.memory.check(running, waiting)
        assert len(running) + self.table.num_free == self._limits.max_num_seqs
        assert self.by_rank == Counter(sequence.request.rank for sequence in running)
        assert self.by_queue == Counter(sequence.queue for sequence in running)
        assert self.by_tenant == Counter((sequence.request.rank, sequence.request.tenant) for sequence in running)
        for sequence in running:
            held = int(self.table.num_blocks[sequence.slot]) * self._limits.block_size
            assert held >= int(self.table.num_computed[sequence.slot])
            assert self.table.num_tokens[sequence.slot] == sequence.num_tokens
            assert self.table.sequences[sequence.slot] is sequence
