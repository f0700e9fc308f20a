"""The decode kernel against its truth in Triton's interpreter; run by test_attention.py in a process of its own.

bf16 is left out: the interpreter's tl.dot multiplies its raw bits. On a GPU, benchmarks/gpu_check.py takes it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.attention import BlockDecode
from engine.kernel_decode import KernelDecode
from engine.shape import Scoring
from kernels import attention, reference

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}  # a few units in the last place of a result around 1


def make_case(
    *, lengths: list[int], heads: int, kv_heads: int, dim: int, size: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Random queries and a cache whose blocks lie scattered; everything no sequence may read is NaN."""
    generator = torch.Generator().manual_seed(sum(lengths) + heads)
    counts = [-(-length // size) for length in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    keys = torch.full((num_blocks, kv_heads, size, dim), torch.nan, dtype=dtype)
    values = keys.clone()
    tables = torch.full((len(lengths), max(counts) + 1), num_blocks + 1_000_000, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count], order = order[:count], order[count:]
        for position in range(length):
            block = int(tables[row, position // size])
            keys[block, :, position % size] = torch.randn(kv_heads, dim, generator=generator)
            values[block, :, position % size] = torch.randn(kv_heads, dim, generator=generator)
    query = torch.randn(len(lengths), heads, dim, generator=generator).to(dtype)
    return {
        "query": query,
        "keys": keys,
        "values": values,
        "tables": tables,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim", "size"),
    [
        ([1], 1, 1, 16, 16),
        ([1, 16, 17, 63], 9, 3, 64, 16),  # SmolLM2's heads; a block's edge and both its neighbours
        ([33, 5], 4, 4, 32, 32),  # no groups
        ([40], 17, 1, 64, 16),  # one KV head for more queries than a tile has rows
        ([21, 70], 6, 2, 80, 32),  # head_dim is no power of two
    ],
)
def test_kernel_agrees_with_its_truth(
    lengths: list[int], heads: int, kv_heads: int, dim: int, size: int, dtype: torch.dtype
) -> None:
    case = make_case(lengths=lengths, heads=heads, kv_heads=kv_heads, dim=dim, size=size, dtype=dtype)
    out = torch.full_like(case["query"], torch.nan)
    truth = torch.full_like(case["query"], torch.nan)

    attention.paged_decode(**case, scale=dim**-0.5, out=out)
    reference.paged_decode(**case, scale=dim**-0.5, out=truth)

    torch.testing.assert_close(out, truth, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("window", "soft_cap", "has_sinks"),
    [(1, None, False), (16, 3.0, False), (20, 3.0, True), (1000, None, True), (None, 3.0, False)],
)
def test_kernel_agrees_on_windows_caps_and_sinks(
    window: int | None, soft_cap: float | None, has_sinks: bool, dtype: torch.dtype
) -> None:
    # Lengths at a window's edge, a block's edge, and within both.
    case = make_case(lengths=[1, 16, 20, 37], heads=6, kv_heads=2, dim=32, size=16, dtype=dtype)
    options: dict[str, Any] = {"scale": 0.4, "window": window, "soft_cap": soft_cap}
    options["sinks"] = torch.tensor([-9.0, -1.0, 0.0, 1.0, 2.0, 9.0], dtype=dtype) if has_sinks else None
    out = torch.full_like(case["query"], torch.nan)
    truth = torch.full_like(case["query"], torch.nan)

    attention.paged_decode(**case, **options, out=out)
    reference.paged_decode(**case, **options, out=truth)

    torch.testing.assert_close(out, truth, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


def test_kernel_reads_no_block_before_the_window() -> None:
    case = make_case(lengths=[64], heads=2, kv_heads=1, dim=16, size=16, dtype=torch.float32)
    truth = torch.full_like(case["query"], torch.nan)
    reference.paged_decode(**case, scale=0.5, window=20, out=truth)
    case["tables"][0, :2] = 1_000_000  # outside of the cache: positions 0 to 31
    out = torch.full_like(case["query"], torch.nan)
    attention.paged_decode(**case, scale=0.5, window=20, out=out)
    torch.testing.assert_close(out, truth, atol=2e-6, rtol=2e-6)


def test_kernel_reads_strided_queries_and_caches() -> None:
    case = make_case(lengths=[9, 18], heads=4, kv_heads=2, dim=32, size=16, dtype=torch.float32)
    pair = torch.stack([case["keys"], case["values"]], dim=1)  # as a cache that keeps both in one tensor
    wide = torch.cat([case["query"], case["query"]], dim=1)  # as the rows of a merged projection
    views = case | {"query": wide[:, :4], "keys": pair[:, 0], "values": pair[:, 1]}
    out = torch.full_like(wide, torch.nan)[:, :4]
    truth = torch.full_like(case["query"], torch.nan)

    attention.paged_decode(**views, scale=0.5, out=out)
    reference.paged_decode(**case, scale=0.5, out=truth)

    torch.testing.assert_close(out, truth, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("scoring", [Scoring(0.2), Scoring(0.5, window=12, soft_cap=2.0)], ids=["plain", "windowed"])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["no-sinks", "sinks"])
def test_engine_hands_the_kernel_its_block_tables(scoring: Scoring, sinks: torch.Tensor | None) -> None:
    case = make_case(lengths=[9, 18, 32], heads=4, kv_heads=2, dim=32, size=16, dtype=torch.float32)
    tables, starts = case["tables"].numpy(), case["lengths"].numpy() - 1
    options: dict[str, Any] = {"block_size": 16, "device": torch.device("cpu")}
    cache = [case["keys"].nan_to_num(), case["values"].nan_to_num()]

    found = KernelDecode(tables, starts, **options)(case["query"], *cache, scoring, sinks)
    expected = BlockDecode(tables, starts, **options)(case["query"], *cache, scoring, sinks)

    torch.testing.assert_close(found, expected, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("query", torch.zeros(1, 3, 16), "no tiles"),
        ("query", torch.zeros(1, 2, 32), "head_dim"),
        ("values", torch.zeros(4, 2, 16, 16).transpose(0, 1).contiguous().transpose(0, 1), "strides"),
        ("query", torch.zeros(1, 2, 16, dtype=torch.float16), "dtype"),
    ],
)
def test_kernel_refuses_what_it_would_compute_wrongly(name: str, replacement: torch.Tensor, message: str) -> None:
    case = make_case(lengths=[7], heads=2, kv_heads=2, dim=16, size=16, dtype=torch.float32)
    case = case | {name: replacement}
    with pytest.raises(ValueError, match=message):
        attention.paged_decode(**case, scale=1.0, out=torch.empty_like(case["query"]))


@pytest.mark.parametrize("options", [{"window": 0}, {"sinks": torch.zeros(3)}, {"sinks": torch.zeros(4)[::2]}], ids=str)
def test_kernel_refuses_windows_and_sinks_of_no_meaning(options: dict[str, Any]) -> None:
    case = make_case(lengths=[7], heads=2, kv_heads=2, dim=16, size=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="sinks"):
        attention.paged_decode(**case, **options, scale=1.0, out=torch.empty_like(case["query"]))
