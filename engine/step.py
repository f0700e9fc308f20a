"""The plan of one step: what the scheduler decides and a runner computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.request import Sampling


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence, computed in one step: one token of a decode, or a piece of a prefill."""

    request_id: str
    token_ids: tuple[int, ...]
    """The tokens to compute, at least one."""
    start: int
    """Absolute position of the first of them; everything before it is in the KV cache."""
    block_ids: tuple[int, ...]
    """The sequence's block table: position p lies in block_ids[p // block_size] at p % block_size."""
    sampling: Sampling | None
    """How to sample the token after the last one; None for a prefill piece that is not the last."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. Decodes come first, then prefill pieces."""

    number: int
    """Counts from 1."""
    chunks: tuple[Chunk, ...]


class Runner(Protocol):
    """Computes steps: the model's runner, or the echo's."""

    block_size: int
    """Positions in a KV block."""
    num_blocks: int
    """KV blocks in the pool."""
    context_length: int
    """Positions a sequence may have, prompt and output together."""
    eos_ids: frozenset[int]

    def execute(self, plan: StepPlan) -> list[int]:
        """Compute the step; return one token id for each chunk that samples, in the plan's order."""

    def close(self) -> None: ...
