"""The settings of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.limits import Preemption, Prefill
from engine.policies.tiered import FLOORS


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of one engine."""

    model_dir: Path
    """A Hugging Face directory, or one that engine.models.prepare made."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: bfloat16 on CUDA and on CPUs that multiply it in hardware, float32 elsewhere."""
    max_num_seqs: int = 64
    """Slots: sequences in the running batch."""
    max_num_batched_tokens: int = 256
    """Tokens computed in one step."""
    policy: str = "tiered"
    """Who goes first: a name of engine.policies.POLICIES."""
    floors: Mapping[int, float] = field(default_factory=lambda: dict(FLOORS))
    """Of the tiered policy: by rank, the share of the tokens computed that those who want more get at least."""
    max_tenant_seqs: Mapping[int, int] = field(default_factory=dict)
    """By rank, the slots that one tenant may hold; where a rank has none, all."""
    prefill: Prefill = Prefill.CHUNKED
    """How prompts share the steps with the decodes."""
    preemption: Preemption = Preemption.AUTO
    """What becomes of the cache of a sequence that gives up its slot."""
    step_budget_ms: float | None = 200.0
    """No piece of a prompt joins a step with decodes that would then take longer; None: tokens alone bound it."""
    kv_cache_gib: float = 1.0
    """Memory of the KV cache on a CPU, in GiB."""
    kv_swap_gib: float = 0.25
    """Host memory for the KV blocks of preempted sequences, in GiB; 0: none."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that weights, activations and KV cache may take together."""
    echo_step_ms: float = 0.0
    """How long a step of the echo engine takes, in milliseconds."""
