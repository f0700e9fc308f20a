"""What cache and attention must know of a model. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a model is: what cache and memory are reckoned from."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    """Positions for which the model computes what it was trained for: prompt and output together."""

    def kv_bytes(self, positions: int, itemsize: int) -> int:
        """Bytes of keys and values of all layers for so many positions."""
        return 2 * self.layers * self.kv_heads * self.head_dim * positions * itemsize


class Scoring(NamedTuple):
    """How a layer turns products of queries and keys into weights: softmax over cap · tanh(scale · q·k / cap)."""

    scale: float
    window: int | None = None
    """A position sees itself and the window - 1 before it; None: all before it."""
    soft_cap: float | None = None
    """None: scores are not capped."""
