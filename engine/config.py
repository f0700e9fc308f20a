"""What an engine is made of, and the one function that makes it. No torch here: an echo engine starts without it."""

from __future__ import annotations

import importlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.detokenizer import Detokenizer
from engine.echo import EchoRunner
from engine.errors import ModelError
from engine.limits import Limits, Preemption, Prefill
from engine.loop import EngineLoop
from engine.models.spec import read_json
from engine.policies import POLICIES
from engine.request import Engine
from engine.scheduler import Scheduler
from engine.step import Runner


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


def build(config: EngineConfig) -> Engine:
    """The engine for the model in config.model_dir, loaded and not yet started.

    Raises ModelError, in one sentence for the operator, if the model cannot be served here.
    """
    runner = _runner(config)
    try:
        return EngineLoop(runner, _detokenizer(config.model_dir), scheduler_for(runner, config))
    except BaseException:
        runner.close()
        raise


def scheduler_for(runner: Runner, config: EngineConfig) -> Scheduler:
    """The scheduler of a runner. Raises ValueError as Limits does, and for a policy that does not exist."""
    if config.policy not in POLICIES:
        raise ValueError(f"policy is {config.policy!r}; there are {', '.join(POLICIES)}")
    limits = Limits(
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        num_host_blocks=runner.num_host_blocks,
        context_length=runner.context_length,
        eos_ids=runner.eos_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        step_budget_ms=config.step_budget_ms,
        prefill=config.prefill,
        preemption=config.preemption,
    )
    return Scheduler(limits, policy=POLICIES[config.policy](), secret=secrets.token_bytes(32))


def _runner(config: EngineConfig) -> Runner:
    if read_json(config.model_dir / "config.json").get("model_type") == "echo":
        return EchoRunner(step_ms=config.echo_step_ms)
    # By name, not by an import above: torch takes seconds and half a gigabyte, and the echo engine must not pay for it.
    runner: Runner = importlib.import_module("engine.runner").ModelRunner(config)
    return runner


def _detokenizer(model_dir: Path) -> Detokenizer:
    try:
        return Detokenizer.load(model_dir)
    except Exception as error:  # tokenizers raises nothing narrower for a missing or broken file
        raise ModelError(f"{model_dir}: tokenizer.json cannot be used: {error}") from error
