"""Computes steps with the real model, on the CPU or on CUDA."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engine.attention import BlockDecode, DecodeOf, KVCache, PagedAttention
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.models.fused import FusedDecoder
from engine.models.spec import ModelSpec, read_spec
from engine.models.weights import Checkpoint
from engine.sampling import sample
from engine.step import Moves, Sampled, StepPlan

BLOCK_SIZE = 32
"""Positions in a KV block."""


class ModelRunner:
    """A step.Runner over a FusedDecoder and a paged KV cache, in this process."""

    block_size = BLOCK_SIZE

    def __init__(self, config: EngineConfig, *, is_shared: bool = False) -> None:
        """Load the model and reserve its cache. Raises ModelError if either cannot be had.

        is_shared  the cache is shared with the processes that this one forks (on the CPU)
        """
        self._device = choose_device()
        spec = read_spec(config.model_dir)
        dtype = choose_dtype(config.dtype, self._device)
        self._decoder = FusedDecoder(spec, Checkpoint(config.model_dir), dtype=dtype, device=self._device)
        self.num_blocks = _num_blocks(config, spec, dtype, self._device)
        self.context_length = min(spec.max_positions, self.num_blocks * BLOCK_SIZE)
        self.vocab_size = spec.vocab_size
        self.eos_ids = spec.eos_ids
        self.num_host_blocks = int(config.kv_swap_gib * 2**30 // spec.kv_bytes(BLOCK_SIZE, dtype.itemsize))
        self._cache = KVCache(
            spec,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            device=self._device,
            num_host_blocks=self.num_host_blocks,
            is_shared=is_shared,
        )
        self._decode_of = _decode_of(self._device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Sampled:
        """Move blocks, compute the step, and sample behind each chunk that does."""
        logits, chunks = self.logits(plan), plan.sampling_chunks
        if not chunks:
            return Sampled([])
        return sample(
            logits,
            [sampling for sampling in plan.samplings if sampling is not None],
            (plan.starts + plan.counts)[chunks].tolist(),
            pasts={row: plan.pasts[chunk] for row, chunk in enumerate(chunks) if chunk in plan.pasts},
            masks={row: plan.masks[chunk] for row, chunk in enumerate(chunks) if chunk in plan.masks},
            eos_ids=self.eos_ids,
        )

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Move blocks, compute the step: the logits [R, V] behind the chunks that sample, in the model's dtype."""
        self._cache.move(plan.moves)
        tokens = torch.from_numpy(plan.token_ids.astype(np.int64)).to(self._device)
        positions = torch.from_numpy(plan.positions).to(self._device)
        hidden = self._decoder.forward(tokens, positions, PagedAttention(self._cache, plan, self._decode_of))
        ends = np.cumsum(plan.counts, dtype=np.int64)[plan.sampling_chunks]
        return self._decoder.logits(hidden[torch.from_numpy(ends - 1).to(self._device)])

    def move(self, moves: Moves) -> None:
        """Move blocks, and nothing else."""
        self._cache.move(moves)

    def close(self) -> None:
        """Nothing to give back."""


def choose_device() -> torch.device:
    """CUDA where torch sees a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that the setting `name` means on this device."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" or _cpu_multiplies_bfloat16() else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _cpu_multiplies_bfloat16() -> bool:
    """Elsewhere bf16 is emulated, and slower than fp32."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags)


def _num_blocks(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> int:
    """Blocks that fit into the memory that the settings give the cache."""
    block_bytes = spec.kv_bytes(BLOCK_SIZE, dtype.itemsize)
    if device.type == "cpu":
        budget, setting = config.kv_cache_gib * 2**30, f"kv_cache_gib {config.kv_cache_gib}"
    else:
        free, total = torch.cuda.mem_get_info(device)
        budget = total * config.gpu_memory_utilization - (total - free) - _activation_bytes(config, spec)
        setting = f"gpu_memory_utilization {config.gpu_memory_utilization}"
    if budget < block_bytes:
        raise ModelError(f"{setting} leaves no memory for a single KV block of {block_bytes} bytes beside the model")
    return int(budget // block_bytes)


def _activation_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """A bound on what a step takes beside weights and cache: hidden states, MLP, scores of a piece, logits, in fp32."""
    per_token = 8 * spec.hidden_size + 4 * spec.intermediate_size + 4 * spec.heads * spec.head_dim
    scores = 2 * spec.heads * config.max_num_batched_tokens * spec.max_positions
    return 4 * (config.max_num_batched_tokens * per_token + scores + 4 * config.max_num_seqs * spec.vocab_size)


def _decode_of(device: torch.device) -> DecodeOf:
    if device.type == "cpu":
        return BlockDecode
    # Here, not above: a CPU needs no Triton, whose import takes a second.
    from engine.kernel_decode import KernelDecode

    return KernelDecode
