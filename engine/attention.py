"""Paged attention of one batch: where each token's key and value are kept, and what each query may see.

A batch holds decode rows first (one token each), then prefill pieces. Decode rows attend together, each piece alone.
Letters in shapes: T tokens, N decode rows, B blocks, S block_size, Q query heads, K KV heads, G = Q / K, D head_dim.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from engine.models.spec import ModelSpec
from engine.step import Ints, Moves, StepPlan

Decode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Query [N, Q, D], a layer's keys and values [blocks, K, S, D] → [N, Q, D]; made for one batch, called once a layer."""


class DecodeOf(Protocol):
    """Makes the decode attention of one batch."""

    def __call__(
        self, tables: Ints, starts: Ints, *, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> Decode:
        """tables [N, W] and starts [N] as in a StepPlan; dtype and device are the cache's."""


class KVCache:
    """Keys and values of every layer, in blocks: [num_blocks, K, S, D] each."""

    def __init__(
        self,
        spec: ModelSpec,
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
        shape = (spec.layers, 2, num_blocks, spec.kv_heads, block_size, spec.head_dim)
        # Zeros, not empty: the tail of a block is masked, but 0 × NaN would still be NaN.
        self._all = _shared_zeros(shape, dtype) if is_shared else torch.zeros(shape, dtype=dtype, device=device)
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
class Piece:
    """One prefill piece of a batch."""

    rows: slice
    """Its rows among the batch's tokens."""
    history: torch.Tensor | None
    """The blocks that hold its sequence up to its last token, [B] int64; None if the piece begins the sequence."""
    mask: torch.Tensor | None
    """What is added to its scores, [rows, positions]: 0 or -inf; None with history None, which is plainly causal."""


class PagedAttention:
    """The attention of one step over the cache; a models.fused.Attention."""

    def __init__(self, cache: KVCache, plan: StepPlan, decode_of: DecodeOf) -> None:
        keys = cache.keys[0]
        dtype, device, n = keys.dtype, keys.device, plan.num_decodes
        self._cache = cache
        self._decodes = n
        self._decode = None
        if n:
            self._decode = decode_of(
                plan.tables[:n], plan.starts[:n], block_size=cache.block_size, dtype=dtype, device=device
            )
        self._pieces = _pieces(plan, dtype=dtype, device=device)
        positions = plan.positions
        blocks = plan.tables[plan.rows, positions // cache.block_size].astype(np.int64)
        self._blocks = torch.from_numpy(blocks).to(device)  # [T]
        self._offsets = torch.from_numpy(positions % cache.block_size).to(device)  # [T]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._blocks, :, self._offsets] = key
        values[self._blocks, :, self._offsets] = value
        parts = [self._decode(query[: self._decodes], keys, values)] if self._decode else []
        parts += [_attend_piece(piece, query, key, value, keys, values) for piece in self._pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _pieces(plan: StepPlan, *, dtype: torch.dtype, device: torch.device) -> list[Piece]:
    pieces, row = [], plan.num_decodes
    first = plan.num_decodes
    for start, count, table in zip(
        plan.starts[first:].tolist(), plan.counts[first:].tolist(), plan.tables[first:], strict=True
    ):
        history = mask = None
        if start:
            end = start + count
            history = torch.tensor(table[: -(-end // plan.block_size)], dtype=torch.int64, device=device)
            visible = torch.arange(end) <= torch.arange(start, end)[:, None]
            mask = torch.zeros(count, end, dtype=dtype).masked_fill_(~visible, -torch.inf).to(device)
        pieces.append(Piece(slice(row, row + count), history, mask))
        row += count
    return pieces


def _attend_piece(
    piece: Piece,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """[rows, Q, D] of one piece: over its own keys if it begins its sequence, over the sequence's blocks otherwise."""
    q = query[piece.rows].transpose(0, 1).unsqueeze(0)
    if piece.history is None or piece.mask is None:
        k, v = key[piece.rows].transpose(0, 1).unsqueeze(0), value[piece.rows].transpose(0, 1).unsqueeze(0)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        end = piece.mask.shape[1]
        k, v = _gather(keys, piece.history, end), _gather(values, piece.history, end)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=piece.mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def _gather(cache: torch.Tensor, block_ids: torch.Tensor, end: int) -> torch.Tensor:
    """The first `end` positions of a sequence, [1, K, end, D], copied out of its blocks."""
    blocks = cache.index_select(0, block_ids).transpose(0, 1)  # [K, B, S, D]
    return blocks.flatten(1, 2)[:, :end].unsqueeze(0)


class BlockDecode:
    """Decode attention in plain torch: every block of every sequence is one small matrix product.

    Scores of all blocks come from one batched product, so that a batch of sequences of any lengths costs two dozen
    operations a layer and no padding beyond a sequence's last block. The softmax runs over a sequence's blocks:

        m = max over its blocks, p = exp(score - m), out = Σ p·v / Σ p

    Every sequence has a last block, the only one that may hold positions past its end. These come first, row by row,
    and the other blocks are reduced into them by their owners:

        blocks   last of 0 | last of 1 | … | last of N-1 | others of 0 | others of 1 | …
        owners   0           1           …   N-1           0 0 0         1 1           …

    Against one scaled_dot_product_attention per sequence (2 lanes of 24 sequences of 265 tokens, 30 layers, 2 cores of
    a Xeon with AMX): 54 ms instead of 118 ms with scattered blocks, or of 63 ms with a sequence's blocks in a row.
    """

    def __init__(
        self, tables: Ints, starts: Ints, *, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        rows, last = np.arange(len(starts)), starts // block_size
        others = tables[np.arange(tables.shape[1]) < last[:, None]]  # row by row
        owners = np.repeat(rows, last)
        self._blocks = torch.from_numpy(np.concatenate([tables[rows, last], others]).astype(np.int64))  # [B]
        self._owners = torch.from_numpy(owners)  # [B - N]
        self._all_owners = torch.from_numpy(np.concatenate([rows, owners]))  # [B]
        hidden = torch.from_numpy(np.arange(block_size) > (starts % block_size)[:, None])  # [N, S]
        self._bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        n, heads, dim = query.shape
        blocks, (_, kv_heads, size, _) = len(self._blocks), keys.shape
        asked = query.reshape(n, -1).index_select(0, self._all_owners).view(blocks * kv_heads, heads // kv_heads, dim)
        key = keys.index_select(0, self._blocks).view(blocks * kv_heads, size, dim)
        scores = torch.bmm(asked, key.transpose(1, 2)).view(blocks, heads, size).float().mul_(dim**-0.5)
        scores[:n] += self._bias
        highest = scores.amax(dim=-1)  # [B, Q]
        owners = self._owners[:, None].expand(-1, heads)
        highest = highest[:n].scatter_reduce(0, owners, highest[n:], "amax")  # [N, Q]
        weights = scores.sub_(highest.index_select(0, self._all_owners).unsqueeze(-1)).exp_()  # [B, Q, S]
        total = weights.sum(dim=-1)
        total = total[:n].index_add(0, self._owners, total[n:])  # [N, Q]
        value = values.index_select(0, self._blocks).view(blocks * kv_heads, size, dim)
        parts = torch.bmm(weights.to(query.dtype).view(blocks * kv_heads, heads // kv_heads, size), value)
        parts = parts.view(blocks, heads * dim).float()
        out = parts[:n].index_add_(0, self._owners, parts[n:])
        return out.view(n, heads, dim).div_(total.unsqueeze(-1)).to(query.dtype)
