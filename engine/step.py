"""The plan of one step: what the scheduler decides and a runner computes; and what came of it.

A plan is a struct of arrays, frozen once made.

Letters in shapes: C chunks, T tokens, W blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from engine.request import Finish, Sampling, TokenLogprob

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
class Past:
    """What a sampler must know of a sequence's tokens, where the sampling asks for it."""

    num_generated: int
    """Tokens generated so far, over all attempts."""
    tail: tuple[int, ...]
    """The newest tokens, the prompt's too: as many as the longest bad word has before its last."""
    token_ids: Ints
    """[U] Different tokens of the line, where they are counted; in any order."""
    counts: Ints
    """[U] How often each was generated; 0 for those of the prompt alone."""


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
    pasts: Mapping[int, Past] = field(default_factory=dict)
    """By chunk, for those that sample and whose sampling needs it."""
    masks: Mapping[int, Ints] = field(default_factory=dict)
    """By chunk, for some of those that sample, [ceil(vocabulary / 32)]: bit t % 32 of word t // 32 says whether token t
    may come. Beside what the sampling says itself; a scheduler makes none."""

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
    def sampling_chunks(self) -> list[int]:
        """[R] The chunks that sample."""
        behind = range(self.num_decodes, len(self))
        return [*range(self.num_decodes), *(chunk for chunk in behind if self.samplings[chunk] is not None)]

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
            pasts=_renumbered(self.pasts, indices),
            masks=_renumbered(self.masks, indices),
        )


_T = TypeVar("_T")


def _renumbered(by_chunk: Mapping[int, _T], indices: Sequence[int]) -> dict[int, _T]:
    """What belongs to these chunks, by their place among them."""
    if not by_chunk:
        return {}
    return {place: by_chunk[index] for place, index in enumerate(indices) if index in by_chunk}


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


class Sampled(NamedTuple):
    """What a step has sampled, in the order of the plan's chunks that sample."""

    token_ids: list[int]
    """[R]"""
    logprobs: Mapping[int, TokenLogprob] = {}
    """By place in token_ids, for those that asked for them."""
    errors: Mapping[int, str] = {}
    """By place in token_ids, where no token could be chosen: why, in one sentence. The token id there means nothing."""


class Masks(Protocol):
    """Knows which tokens may come next, by a grammar for instance, and is asked before each step."""

    def masks(self, plan: StepPlan) -> Mapping[int, Ints]:
        """As StepPlan.masks has them."""


class Progress(NamedTuple):
    """What one step, or nothing but its arrival or the passing of time, did for one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """The tokens it gained."""
    finish: Finish | None = None
    error: str | None = None
    """One sentence, with Finish.ERROR."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of token_ids, where the request asks for them."""


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
    vocab_size: int
    """Token ids are below it."""
    eos_ids: frozenset[int]

    def execute(self, plan: StepPlan) -> Sampled:
        """Move blocks, compute the step, and sample behind each chunk that does."""

    def close(self) -> None: ...
