"""Decode attention on CUDA: the Triton kernel, as an attention.Decode. A file apart, so that a CPU needs no Triton."""

from __future__ import annotations

import torch

from engine.shape import Scoring
from engine.step import Ints
from kernels.attention import paged_decode


class KernelDecode:
    """The block tables of one batch of decode rows, on the device."""

    def __init__(self, tables: Ints, starts: Ints, *, block_size: int, device: torch.device) -> None:
        self._tables = torch.tensor(tables, device=device)
        self._lengths = torch.tensor(starts + 1, device=device)

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scoring: Scoring,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = query.contiguous()
        return paged_decode(
            query,
            keys,
            values,
            self._tables,
            self._lengths,
            scale=scoring.scale,
            window=scoring.window,
            soft_cap=scoring.soft_cap,
            sinks=sinks,
            out=torch.empty_like(query),
        )
