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
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The truth of kernels.attention.paged_decode, with its arguments; computes in fp32."""
    kv_heads, size = keys.shape[1:3]
    group = query.shape[1] // kv_heads
    for row, length in enumerate(lengths.tolist()):
        blocks = tables[row, : -(-length // size)].long()
        key = keys[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()  # [K, length, D]
        value = values[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()
        asked = query[row].view(kv_heads, group, -1).float()  # [K, G, D]
        scores = scale * asked @ key.transpose(1, 2)  # [K, G, length]
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if window is not None:
            scores[..., : max(0, length - window)] = -torch.inf
        if sinks is not None:  # one more position, whose value is 0
            scores = torch.cat([scores, sinks.float().view(kv_heads, group, 1)], dim=-1)
            value = torch.cat([value, torch.zeros_like(value[:, :1])], dim=1)
        weights = torch.softmax(scores, dim=-1)
        out[row] = (weights @ value).flatten(0, 1).to(out.dtype)
    return out
