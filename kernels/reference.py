"""What the kernels must compute, in plain torch: slow, and short enough to be seen to be right."""

from __future__ import annotations

import torch


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """The truth of kernels.attention.paged_decode, with its arguments; computes in fp32."""
    kv_heads, size = keys.shape[1:3]
    group = query.shape[1] // kv_heads
    for row, length in enumerate(lengths.tolist()):
        blocks = tables[row, : -(-length // size)].long()
        key = keys[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()  # [K, length, D]
        value = values[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()
        asked = query[row].view(kv_heads, group, -1).float()  # [K, G, D]
        weights = torch.softmax(scale * asked @ key.transpose(1, 2), dim=-1)
        out[row] = (weights @ value).flatten(0, 1).to(out.dtype)
    return out
