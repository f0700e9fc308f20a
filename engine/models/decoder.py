"""What the engine asks of a model, and a model of attention: one interface for both paths.

The tokens of all sequences of a step stand in one row, [T]; nothing is padded. Attention alone knows which token
belongs to which sequence, and comes in as a function. Letters in shapes: T tokens, R rows that sample, H hidden,
I intermediate, V vocabulary, Q query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.shape import Scoring, Shape


class Attention(Protocol):
    """What a model asks of attention, once per layer."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store key and value [T, K, D] of `layer`, then attend: query [T, Q, D] → [T, Q, D]. Positions are applied.

        sinks  [Q] a score of each head that takes weight and gives no value; None: none
        """


class Decoder(Protocol):
    """A language model over packed tokens."""

    shape: Shape

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Compute `tokens` [T] at `positions` [T]; [R, V] in the model's dtype, of `rows` [R]. All are int64."""
