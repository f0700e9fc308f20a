"""Rotary position embedding."""

from __future__ import annotations

import torch

from engine.models.spec import Rope


class Rotary:
    """Cosines and sines of a rotary embedding, made for the positions of each step: no table of all of them."""

    def __init__(self, rope: Rope, *, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = torch.tensor(rope.frequencies, dtype=torch.float32, device=device)
        self._amplitude = rope.amplitude
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines of `positions` [T], [T, 1, R] each; angles in fp32."""
        angles = positions[:, None, None].float() * self._frequencies  # [T, 1, R/2]
        cos, sin = angles.cos().mul_(self._amplitude), angles.sin().mul_(self._amplitude)
        return torch.cat([cos, cos], dim=-1).to(self._dtype), torch.cat([-sin, sin], dim=-1).to(self._dtype)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn `heads` [T, N, D] by what a Rotary gave, [T, 1, R] each; dimensions from R on stay.

    Dimension i turns with dimension i + R/2 by the same angle a: (x, y) → (x cos a - y sin a, y cos a + x sin a).
    Rolling by R/2 brings each its partner, and the sine carries the sign, so three operations do it.
    Source: Su et al. 2021, eq. 34, in the half-split order of the Llama checkpoints on Hugging Face.
    """
    size = cos.shape[-1]
    if size < heads.shape[-1]:
        return torch.cat([rotate(heads[..., :size], cos, sin), heads[..., size:]], dim=-1)
    return (heads * cos).addcmul_(heads.roll(size // 2, dims=-1), sin)
