"""Decode attention on CUDA: the Triton kernel, as an attention.Decode. A file apart, so that a CPU needs no Triton."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.step import Chunk
from kernels.attention import paged_decode


class KernelDecode:
    """The block tables of one batch of decode rows, on the device."""

    def __init__(self, chunks: Sequence[Chunk], *, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        tables = np.zeros((len(chunks), max(len(chunk.block_ids) for chunk in chunks)), dtype=np.int32)
        for row, chunk in enumerate(chunks):
            tables[row, : len(chunk.block_ids)] = chunk.block_ids
        self._tables = torch.from_numpy(tables).to(device)
        self._lengths = torch.tensor([chunk.start + 1 for chunk in chunks], dtype=torch.int32, device=device)

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        query = query.contiguous()
        out = torch.empty_like(query)
        scale = query.shape[-1] ** -0.5
        return paged_decode(query, keys, values, self._tables, self._lengths, scale=scale, out=out)
