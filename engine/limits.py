"""What bounds the scheduler, and the choices that an operator makes for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Prefill(StrEnum):
    """How prompts share the steps with the decodes."""

    FIRST = "first"
    """While there are prompts to compute, steps compute nothing else: the shortest wait, and the longest stalls."""
    INTERLEAVED = "interleaved"
    """A step of prompts, a step of decodes, in turn."""
    CHUNKED = "chunked"
    """Every step decodes, and pieces of prompts fill what is left of its budget."""


class Preemption(StrEnum):
    """What becomes of the KV cache of a sequence that gives up its slot."""

    RECOMPUTE = "recompute"
    """Its blocks are free, its tokens kept: they are prefilled again, but for what the prefix cache still has."""
    SWAP = "swap"
    """Its blocks move to host memory and back; where that is full, as recompute."""
    DISCARD = "discard"
    """It starts over. Only who has shown nothing yet is taken a slot from."""
    AUTO = "auto"
    """Swap where that is expected to take less time than to compute again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Raises ValueError where a step could not hold one token for each slot."""

    block_size: int
    """Positions in a KV block."""
    num_blocks: int
    context_length: int
    """Positions that a sequence may have, prompt and output together."""
    eos_ids: frozenset[int]
    max_num_seqs: int
    """Slots: sequences in the running batch."""
    max_num_batched_tokens: int
    """Tokens computed in one step."""
    vocab_size: int | None = None
    """Token ids are below it; None: they are not looked at."""
    num_host_blocks: int = 0
    """Blocks of host memory to swap to."""
    step_budget_ms: float | None = None
    """No piece of a prompt joins a step with decodes that would then be expected to take longer; None: no such bound.
    One block of prompt always goes in, so that prompts get ahead beside decodes that take all of it themselves."""
    prefill: Prefill = Prefill.CHUNKED
    preemption: Preemption = Preemption.AUTO
    quantum_steps: int = 8
    """A sequence that joined so few steps ago is not preempted for a higher tier."""
    max_preemptions: int = 4
    """A request that was preempted so often for higher tiers keeps its slot until it has grown by an eighth."""
    max_waiting: int | None = None
    """Requests that may wait; None: any number."""
    max_waiting_tokens: int | None = None
    """Prompt tokens that may wait; None: any number."""
    max_tenant_seqs: Mapping[int, int] = field(default_factory=dict)
    """By rank, the slots that one tenant may hold; where a rank has none, all."""
    prefix_cache: bool = True
    """Whether blocks of a common beginning are shared, and found again after their sequence has ended."""
    swap_block_ms: float = 0.05
    """Milliseconds to move one block to host memory, or back."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}; there is at least one slot")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; a step holds a token for each of the "
                f"max_num_seqs = {self.max_num_seqs} slots"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)
