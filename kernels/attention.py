"""Decode attention over a paged KV cache, in Triton. Truth: kernels.reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MIN_ROWS = 16
"""tl.dot wants tiles of at least 16 rows: the query heads of a KV head are padded to so many."""


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend one query of each sequence to the sequence's keys and values, softmax(cap · tanh(scale · q·k / cap)) · v.

    query    [N, Q, D] bf16, fp16 or fp32; D contiguous
    keys     [blocks, K, S, D] of query's dtype; Q a multiple of K, S a power of two, at least 16; D contiguous
    values   as keys, with the same strides
    tables   [N, B] int32: position p of sequence n lies in block tables[n, p // S], at p % S; the rest is not read
    lengths  [N] int32: positions of each sequence, at least 1
    out      [N, Q, D], the dtype and strides of query; every element is written
    window   only the last so many positions are seen, at least 1; None: all
    soft_cap the cap; None: softmax(scale · q·k) · v
    sinks    [Q] contiguous: a score of each head that takes weight and gives no value; None: none
    Returns out. Sums and softmax in fp32.
    Raises ValueError if shapes, strides or dtypes are not these.
    Source: FlashAttention-2's online softmax (Dao 2023, algorithm 1) over vLLM's block tables (Kwon et al. 2023).
    """
    rows, heads, dim = query.shape
    _, kv_heads, size, _ = keys.shape
    if heads % kv_heads or size < _MIN_ROWS or size & (size - 1):
        raise ValueError(f"{heads} heads, {kv_heads} KV heads, blocks of {size}: no tiles of these")
    if values.shape != keys.shape or values.stride() != keys.stride() or keys.shape[-1] != dim:
        raise ValueError("keys and values must agree in shape and strides, and with query in head_dim")
    if out.shape != query.shape or out.stride() != query.stride() or query.stride(-1) != 1 or keys.stride(-1) != 1:
        raise ValueError("out must have the shape and strides of query, with head_dim contiguous everywhere")
    if not query.dtype == keys.dtype == values.dtype == out.dtype:
        raise ValueError("query, keys, values and out must have one dtype")
    if (sinks is not None and (sinks.shape != (heads,) or not sinks.is_contiguous())) or (
        window is not None and window < 1
    ):
        raise ValueError("sinks must be one for each head, and a window at least 1")
    group = heads // kv_heads
    _paged_decode[(rows, kv_heads)](
        query,
        keys,
        values,
        tables,
        lengths,
        out,
        query if sinks is None else sinks,  # without sinks it is not read
        scale,
        window or 0,
        soft_cap or 0.0,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        tables.stride(0),
        GROUP=group,
        GROUP_ROWS=max(_MIN_ROWS, triton.next_power_of_2(group)),
        DIM=dim,
        DIM_COLUMNS=triton.next_power_of_2(dim),
        SIZE=size,
        HAS_WINDOW=window is not None,
        HAS_CAP=soft_cap is not None,
        HAS_SINKS=sinks is not None,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _paged_decode(  # type: ignore[no-untyped-def]  # Triton would take annotations for its own types
    query_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    sinks_ptr,
    scale,
    window,
    soft_cap,
    query_row_stride,
    query_head_stride,
    block_stride,
    kv_head_stride,
    position_stride,
    table_stride,
    GROUP: tl.constexpr,  # noqa: N803
    GROUP_ROWS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    DIM_COLUMNS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    HAS_WINDOW: tl.constexpr,  # noqa: N803
    HAS_CAP: tl.constexpr,  # noqa: N803
    HAS_SINKS: tl.constexpr,  # noqa: N803
):
    """One program computes one sequence's queries of one KV head: GROUP rows, block after block of the sequence."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    group, dims, offsets = tl.arange(0, GROUP_ROWS), tl.arange(0, DIM_COLUMNS), tl.arange(0, SIZE)
    is_dim = dims < DIM
    # 64 bits: a cache of more than 2**31 elements is no rarity.
    query_offset = row.to(tl.int64) * query_row_stride
    head_offsets = query_offset + (kv_head * GROUP + group)[:, None] * query_head_stride + dims[None, :]
    is_query = (group < GROUP)[:, None] & is_dim[None, :]
    query = tl.load(query_ptr + head_offsets, mask=is_query, other=0.0)  # [GROUP_ROWS, DIM_COLUMNS]

    length = tl.load(lengths_ptr + row)
    highest = tl.full([GROUP_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    summed = tl.zeros([GROUP_ROWS, DIM_COLUMNS], tl.float32)
    if HAS_SINKS:  # as a first position whose value is 0
        highest = tl.load(sinks_ptr + kv_head * GROUP + group, mask=group < GROUP, other=0.0).to(tl.float32)
        total = tl.full([GROUP_ROWS], 1.0, tl.float32)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(length - window, 0)
    for block in range(begin // SIZE, tl.cdiv(length, SIZE)):
        block_id = tl.load(tables_ptr + row.to(tl.int64) * table_stride + block).to(tl.int64)
        base = block_id * block_stride + kv_head.to(tl.int64) * kv_head_stride
        kv_offsets = base + offsets[:, None] * position_stride + dims[None, :]
        is_position = (block * SIZE + offsets < length) & (block * SIZE + offsets >= begin)
        is_kv = is_position[:, None] & is_dim[None, :]
        key = tl.load(keys_ptr + kv_offsets, mask=is_kv, other=0.0)  # [SIZE, DIM_COLUMNS]
        value = tl.load(values_ptr + kv_offsets, mask=is_kv, other=0.0)
        # ieee: in fp32 the tensor cores would round the factors to 10 bits.
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [GROUP_ROWS, SIZE]
        if HAS_CAP:
            scores = soft_cap * (1 - 2 / (tl.exp(2 * scores / soft_cap) + 1))  # tanh; right at both infinities too
        scores = tl.where(is_position[None, :], scores, -float("inf"))
        # The loop begins with the block of the first position, so `higher` is finite from there on.
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        summed = summed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        highest = higher
    result = summed / total[:, None]
    tl.store(out_ptr + head_offsets, result.to(out_ptr.dtype.element_ty), mask=is_query)
