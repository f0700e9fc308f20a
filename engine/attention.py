"""Paged attention of one batch: where each token's key and value are kept, and what each query may see.

A batch holds decode rows first (one token each), then prefill pieces. Decode rows attend together, each piece alone.
Letters in shapes: T tokens, N decode rows, B blocks, S block_size, Q query heads, K KV heads, G = Q / K, D head_dim.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from engine.shape import Scoring, Shape
from engine.step import Ints, Moves, StepPlan


class Decode(Protocol):
    """The decode attention of one batch, called once a layer."""

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scoring: Scoring,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Query [N, Q, D], a layer's keys and values [blocks, K, S, D], sinks [Q] → [N, Q, D]."""


class DecodeOf(Protocol):
    """Makes the decode attention of one batch."""

    def __call__(self, tables: Ints, starts: Ints, *, block_size: int, device: torch.device) -> Decode:
        """tables [N, W] and starts [N] as in a StepPlan; the device is the cache's."""


class KVCache:
    """Keys and values of every layer, in blocks: [num_blocks, K, S, D] each."""

    def __init__(
        self,
        shape: Shape,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
        is_shared: bool = False,
    ) -> None:
        """is_shared  in memory that processes forked from this one share, on the CPU"""
        self.block_size = block_size
        sizes = (shape.layers, 2, num_blocks, shape.kv_heads, block_size, shape.head_dim)
        # Zeros, not empty: the tail of a block is masked, but 0 × NaN would still be NaN.
        self._all = _shared_zeros(sizes, dtype) if is_shared else torch.zeros(sizes, dtype=dtype, device=device)
        self.keys = [layer[0] for layer in self._all]
        self.values = [layer[1] for layer in self._all]
        self._num_host_blocks = num_host_blocks
        self._host: torch.Tensor | None = None

    @torch.inference_mode()
    def move(self, moves: Moves) -> None:
        """Carry out a step's moves of whole blocks, in all layers."""
        if moves.swaps_out:
            sources, targets = _pairs(moves.swaps_out)
            self._host_memory()[:, :, targets] = self._all[:, :, sources.to(self._all.device)].cpu()
        if moves.copies:
            sources, targets = (ids.to(self._all.device) for ids in _pairs(moves.copies))
            self._all[:, :, targets] = self._all[:, :, sources]
        if moves.swaps_in:
            sources, targets = _pairs(moves.swaps_in)
            self._all[:, :, targets.to(self._all.device)] = self._host_memory()[:, :, sources].to(self._all.device)

    def _host_memory(self) -> torch.Tensor:
        """Made at the first swap: most services never need it."""
        if self._host is None:
            layers, two, _, *block = self._all.shape
            self._host = torch.empty((layers, two, self._num_host_blocks, *block), dtype=self._all.dtype)
        return self._host


def _shared_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Anonymous memory: no file, no limit of /dev/shm, and gone with the last process that has it."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _pairs(moves: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and targets, int64 on the CPU."""
    pairs = torch.tensor(moves, dtype=torch.int64)
    return pairs[:, 0], pairs[:, 1]


@dataclass(frozen=True, slots=True)
class View:
    """What the queries of a prefill piece see through some window."""

    history: torch.Tensor | None
    """The blocks that hold it, [B] int64; None if the piece begins its sequence: its own keys are all."""
    end: int
    """Positions in these blocks, up to the piece's last."""
    mask: torch.Tensor | None
    """What is added to its scores, [rows, end]: 0 or -inf; None where it is plainly causal."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One prefill piece of a batch."""

    rows: slice
    """Its rows among the batch's tokens."""
    start: int
    """Absolute position of the first of them."""
    table: Ints
    """[B] The blocks of its sequence."""

    def view(self, window: int | None, *, block_size: int, dtype: torch.dtype, device: torch.device) -> View:
        """What it sees where only the last `window` positions are seen, each query its own."""
        count = self.rows.stop - self.rows.start
        if not self.start and (window is None or count <= window):
            return View(history=None, end=count, mask=None)
        end = self.start + count
        first = max(0, self.start - window + 1) // block_size if window is not None else 0
        positions, queries = torch.arange(first * block_size, end), torch.arange(self.start, end)[:, None]
        is_hidden = positions > queries
        if window is not None:
            is_hidden |= positions <= queries - window
        mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, -torch.inf).to(device)
        history = None
        if self.start:
            history = torch.tensor(self.table[first : -(-end // block_size)], dtype=torch.int64, device=device)
        return View(history, len(positions), mask)


class PagedAttention:
    """The attention of one step over the cache; a models.decoder.Attention."""

    def __init__(self, cache: KVCache, plan: StepPlan, decode_of: DecodeOf) -> None:
        device, n = cache.keys[0].device, plan.num_decodes
        self._cache = cache
        self._decodes = n
        self._decode = None
        if n:
            self._decode = decode_of(plan.tables[:n], plan.starts[:n], block_size=cache.block_size, device=device)
        self._pieces = _pieces(plan)
        self._views: dict[int | None, list[View]] = {}  # of the pieces, by window
        positions = plan.positions
        blocks = plan.tables[plan.rows, positions // cache.block_size].astype(np.int64)
        self._blocks = torch.from_numpy(blocks).to(device)  # [T]
        self._offsets = torch.from_numpy(positions % cache.block_size).to(device)  # [T]

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As models.decoder.Attention has it."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._blocks, :, self._offsets] = key
        values[self._blocks, :, self._offsets] = value
        parts = [self._decode(query[: self._decodes], keys, values, scoring, sinks)] if self._decode else []
        for piece, view in zip(self._pieces, self._views_through(scoring.window), strict=True):
            if view.history is None:
                k, v = key[piece.rows].transpose(0, 1), value[piece.rows].transpose(0, 1)
            else:
                k, v = _gather(keys, view.history, view.end), _gather(values, view.history, view.end)
            attended = attend(query[piece.rows].transpose(0, 1), k, v, view.mask, scoring, sinks)
            parts.append(attended.transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _views_through(self, window: int | None) -> list[View]:
        if window not in self._views:
            keys = self._cache.keys[0]
            self._views[window] = [
                piece.view(window, block_size=self._cache.block_size, dtype=keys.dtype, device=keys.device)
                for piece in self._pieces
            ]
        return self._views[window]


def _pieces(plan: StepPlan) -> list[Piece]:
    first = plan.num_decodes
    ends = np.cumsum(plan.counts)[first:].tolist()
    rows = [slice(end - count, end) for end, count in zip(ends, plan.counts[first:].tolist(), strict=True)]
    return [
        Piece(rows, start, table)
        for rows, start, table in zip(rows, plan.starts[first:].tolist(), plan.tables[first:], strict=True)
    ]


def _gather(cache: torch.Tensor, block_ids: torch.Tensor, end: int) -> torch.Tensor:
    """The first `end` positions of some blocks, [K, end, D], copied out of them."""
    blocks = cache.index_select(0, block_ids).transpose(0, 1)  # [K, B, S, D]
    return blocks.flatten(1, 2)[:, :end]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one piece.

    query      [Q, rows, D]
    key        [K, positions, D], and so is value
    mask       [rows, positions], added to the scores; None: row i sees positions 0 to i
    scoring    its window is in the mask
    sinks      [Q] or None
    Returns [Q, rows, D].
    """
    if scoring.soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], mask, is_causal=mask is None, scale=scoring.scale, enable_gqa=True
        )[0]
    if mask is None:
        mask = torch.full((query.shape[1], key.shape[1]), -torch.inf, device=query.device).triu_(1)
    (heads, rows, dim), kv_heads = query.shape, key.shape[0]
    asked = query.reshape(kv_heads, heads // kv_heads * rows, dim)
    scores = _scale(torch.bmm(asked, key.transpose(1, 2)).float(), scoring).view(heads, rows, -1).add_(mask)
    highest = scores.amax(dim=-1, keepdim=True)  # [Q, rows, 1]
    if sinks is not None:
        highest = highest.maximum(sinks.float()[:, None, None])
    weights = scores.sub_(highest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += sinks.float()[:, None, None].sub(highest).exp_()
    weights = weights.div_(total).to(query.dtype).view(kv_heads, -1, weights.shape[-1])
    return torch.bmm(weights, value).view(heads, rows, dim)


def _scale(scores: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Products of queries and keys to scores, in place."""
    if scoring.soft_cap is None:
        return scores.mul_(scoring.scale)
    return scores.mul_(scoring.scale / scoring.soft_cap).tanh_().mul_(scoring.soft_cap)


class BlockDecode:
    """Decode attention in plain torch: every block of every sequence is one small matrix product.

    Scores of all blocks come from one batched product, so that a batch of sequences of any lengths costs two dozen
    operations a layer and no padding beyond a sequence's last block. The softmax runs over a sequence's blocks:

        m = max over its blocks, p = exp(score - m), out = Σ p·v / Σ p

    Every sequence has a last block, the only one that may hold positions past its end. These come first, row by row,
    and the other blocks, without a window all before it, are reduced into them by their owners:

        blocks   last of 0 | last of 1 | … | last of N-1 | others of 0 | others of 1 | …
        owners   0           1           …   N-1           0 0 0         1 1           …

    Against one scaled_dot_product_attention per sequence (2 lanes of 24 sequences of 265 tokens, 30 layers, 2 cores of
    a Xeon with AMX): 54 ms instead of 118 ms with scattered blocks, or of 63 ms with a sequence's blocks in a row.
    """

    def __init__(self, tables: Ints, starts: Ints, *, block_size: int, device: torch.device) -> None:
        self._tables = tables
        self._starts = starts
        self._block_size = block_size
        self._seen: dict[int | None, Seen] = {}  # by window

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scoring: Scoring,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if (seen := self._seen.get(scoring.window)) is None:
            seen = Seen.through(scoring.window, self._tables, self._starts, block_size=self._block_size)
            self._seen[scoring.window] = seen
        n, heads, dim = query.shape
        blocks, (_, kv_heads, size, _) = len(seen.blocks), keys.shape
        asked = query.reshape(n, -1).index_select(0, seen.all_owners).view(blocks * kv_heads, heads // kv_heads, dim)
        key = keys.index_select(0, seen.blocks).view(blocks * kv_heads, size, dim)
        scores = _scale(torch.bmm(asked, key.transpose(1, 2)).view(blocks, heads, size).float(), scoring)
        scores[: len(seen.bias)] += seen.bias
        highest = scores.amax(dim=-1)  # [B, Q]
        owners = seen.owners[:, None].expand(-1, heads)
        highest = highest[:n].scatter_reduce(0, owners, highest[n:], "amax")  # [N, Q]
        if sinks is not None:
            highest = highest.maximum(sinks.float())
        weights = scores.sub_(highest.index_select(0, seen.all_owners).unsqueeze(-1)).exp_()  # [B, Q, S]
        total = weights.sum(dim=-1)
        total = total[:n].index_add(0, seen.owners, total[n:])  # [N, Q]
        if sinks is not None:
            total += sinks.float().sub(highest).exp_()
        value = values.index_select(0, seen.blocks).view(blocks * kv_heads, size, dim)
        parts = torch.bmm(weights.to(query.dtype).view(blocks * kv_heads, heads // kv_heads, size), value)
        parts = parts.view(blocks, heads * dim).float()
        out = parts[:n].index_add_(0, seen.owners, parts[n:])
        return out.view(n, heads, dim).div_(total.unsqueeze(-1)).to(query.dtype)


@dataclass(frozen=True, slots=True)
class Seen:
    """The blocks that decode rows see through some window, in BlockDecode's order."""

    blocks: torch.Tensor
    """[B] int64"""
    owners: torch.Tensor
    """[B - N] int64: whose the blocks behind the first N are."""
    all_owners: torch.Tensor
    """[B] int64"""
    bias: torch.Tensor
    """[N, 1, S], or [B, 1, S] with a window, which may begin inside of a block: 0, or -inf where nobody looks."""

    @classmethod
    def through(cls, window: int | None, tables: Ints, starts: Ints, *, block_size: int) -> Seen:
        rows, last = np.arange(len(starts)), starts // block_size
        columns = np.arange(tables.shape[1])
        is_other = columns < last[:, None]
        if window is not None:
            is_other &= columns >= (np.maximum(0, starts - window + 1) // block_size)[:, None]
        owners, others = np.nonzero(is_other)  # row by row
        all_owners = np.concatenate([rows, owners])
        offsets = np.arange(block_size)
        if window is None:
            is_hidden = offsets > (starts % block_size)[:, None]
        else:
            positions = np.concatenate([last, others])[:, None] * block_size + offsets
            ends = starts[all_owners][:, None]
            is_hidden = (positions > ends) | (positions <= ends - window)
        bias = torch.zeros(is_hidden.shape).masked_fill_(torch.from_numpy(is_hidden), -torch.inf)
        return cls(
            blocks=torch.from_numpy(np.concatenate([tables[rows, last], tables[owners, others]]).astype(np.int64)),
            owners=torch.from_numpy(owners),
            all_owners=torch.from_numpy(all_owners),
            bias=bias[:, None],
        )
