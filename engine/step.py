"""The plan of one step: what the scheduler decides and a runner computes; and what came of it.

A plan is a struct of arrays, frozen once made.

Letters in shapes: C chunks, T tokens, W blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine.request import Finish, Sampling

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence, computed in one step: one token of a decode, or a piece of a prefill."""

    request_id: str
    token_ids: tuple[int, ...]
    """The tokens to compute, at least one."""
    start: int
    """Absolute position of the first of them; everything before it is in the KV cache."""
    block_ids: tuple[int, ...]
    """The sequence's block table: position p lies in block_ids[p // block_size] at p % block_size."""
    sampling: Sampling | None
    """How to sample the token after the last one; None for a prefill piece that is not the last."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Whole blocks that a runner moves before it computes, in this order: out, copies, in. Pairs (from, to)."""

    swaps_out: tuple[tuple[int, int], ...] = ()
    """Block of the cache → block of host memory."""
    copies: tuple[tuple[int, int], ...] = ()
    """Block → block of the cache: a shared block is copied before somebody writes into it."""
    swaps_in: tuple[tuple[int, int], ...] = ()
    """Block of host memory → block of the cache."""

    def __bool__(self) -> bool:
        return bool(self.swaps_out or self.copies or self.swaps_in)


NO_MOVES = Moves()


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One forward pass. Decodes come first, then prefill pieces."""

    number: int
    """Counts from 1."""
    block_size: int
    """Positions in a KV block."""
    num_decodes: int
    """The first so many chunks are decodes: one token each, and each samples."""
    request_ids: tuple[str, ...]
    """[C]"""
    samplings: tuple[Sampling | None, ...]
    """[C] How to sample behind each chunk; None for a prefill piece that is not the last."""
    starts: Ints
    """[C] Absolute position of each chunk's first token; everything before it is in the cache."""
    counts: Ints
    """[C] Tokens of each chunk, at least 1."""
    token_ids: Ints
    """[T] The chunks' tokens, one chunk behind the other."""
    tables: Ints
    """[C, W] Block tables: position p of a chunk's sequence lies in tables[chunk, p // block_size], at p % block_size.
    Behind a sequence's last block there may be anything."""
    moves: Moves = NO_MOVES

    def __post_init__(self) -> None:
        for array in (self.starts, self.counts, self.token_ids, self.tables):
            array.setflags(write=False)

    def __len__(self) -> int:
        """Chunks."""
        return len(self.request_ids)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """[T] The chunk that each token is of."""
        return np.repeat(np.arange(len(self)), self.counts)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """[T] Each token's absolute position in its sequence."""
        begins = np.cumsum(self.counts, dtype=np.int64) - self.counts
        positions: npt.NDArray[np.int64] = np.arange(len(self.token_ids)) + np.repeat(self.starts - begins, self.counts)
        return positions

    @property
    def num_sampling(self) -> int:
        """Chunks that sample: so many token ids the runner returns."""
        return self.num_decodes + sum(sampling is not None for sampling in self.samplings[self.num_decodes :])

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The same as objects, for readers to whom a microsecond per chunk is nothing."""
        ends = np.cumsum(self.counts)
        return tuple(
            Chunk(
                request_id,
                token_ids=tuple(self.token_ids[end - count : end].tolist()),
                start=int(start),
                block_ids=tuple(table[: -(-(start + count) // self.block_size)].tolist()),
                sampling=sampling,
            )
            for request_id, start, count, end, table, sampling in zip(
                self.request_ids, self.starts, self.counts, ends, self.tables, self.samplings, strict=True
            )
        )

    def take(self, indices: Sequence[int]) -> StepPlan:
        """The plan of some of its chunks, given in rising order; without moves."""
        rows = np.asarray(indices, dtype=np.int64)
        ends = np.cumsum(self.counts)
        tokens = [self.token_ids[ends[row] - self.counts[row] : ends[row]] for row in rows[rows >= self.num_decodes]]
        decodes = rows[rows < self.num_decodes]
        return StepPlan(
            number=self.number,
            block_size=self.block_size,
            num_decodes=len(decodes),
            request_ids=tuple(self.request_ids[row] for row in indices),
            samplings=tuple(self.samplings[row] for row in indices),
            starts=self.starts[rows],
            counts=self.counts[rows],
            token_ids=np.concatenate([self.token_ids[decodes], *tokens]),
            tables=self.tables[rows],
        )


def pack(number: int, chunks: Sequence[Chunk], *, block_size: int, moves: Moves = NO_MOVES) -> StepPlan:
    """The plan of these chunks, decodes first. A leading chunk of one token that samples is a decode."""
    num_decodes = next(
        (index for index, chunk in enumerate(chunks) if len(chunk.token_ids) > 1 or chunk.sampling is None),
        len(chunks),
    )
    tables = np.zeros((len(chunks), max(len(chunk.block_ids) for chunk in chunks)), dtype=np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.block_ids)] = chunk.block_ids
    return StepPlan(
        number=number,
        block_size=block_size,
        num_decodes=num_decodes,
        request_ids=tuple(chunk.request_id for chunk in chunks),
        samplings=tuple(chunk.sampling for chunk in chunks),
        starts=np.array([chunk.start for chunk in chunks], dtype=np.int32),
        counts=np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int32),
        token_ids=np.array([token for chunk in chunks for token in chunk.token_ids], dtype=np.int32),
        tables=tables,
        moves=moves,
    )


class Progress(NamedTuple):
    """What one step, or nothing but its arrival or the passing of time, did for one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """The tokens it gained."""
    finish: Finish | None = None
    error: str | None = None
    """One sentence, with Finish.ERROR."""


class Runner(Protocol):
    """Computes steps: the model's runner, or the echo's."""

    block_size: int
    """Positions in a KV block."""
    num_blocks: int
    """KV blocks in the pool."""
    num_host_blocks: int
    """Blocks of host memory that KV blocks can be swapped to; 0: none."""
    context_length: int
    """Positions a sequence may have, prompt and output together."""
    eos_ids: frozenset[int]

    def execute(self, plan: StepPlan) -> list[int]:
        """Move blocks, compute the step; one token id for each chunk that samples, in the plan's order."""

    def close(self) -> None: ...
