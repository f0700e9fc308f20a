"""Computes steps with the real model, on the CPU or on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engine.attention import BlockDecode, Decode, KVCache, PagedAttention
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.models.fused import FusedDecoder
from engine.models.spec import ModelSpec, read_spec
from engine.models.weights import Checkpoint
from engine.sampling import sample
from engine.step import Chunk, Moves, StepPlan

BLOCK_SIZE = 32
"""Positions in a KV block."""
MIN_LANE_TOKENS = 4
"""A further lane is used from so many tokens on for each: with fewer, reading the weights is all that a lane does."""


class ModelRunner:
    """A step.Runner over a FusedDecoder and a paged KV cache.

    On the CPU a step is computed in lanes, one per torch thread: each lane takes a share of the sequences and goes
    through the model with a single thread. The sequences of a step have nothing to do with each other, so the lanes
    meet only at the step's end, where threads inside each operation would meet a thousand times a step. On 2 cores of
    a Xeon with AMX (OpenMP passive) such a meeting costs 70 μs, as much as most operations of a small model themselves.
    """

    block_size = BLOCK_SIZE

    def __init__(self, config: EngineConfig) -> None:
        """Load the model and reserve its cache. Raises ModelError if either cannot be had."""
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        spec = read_spec(config.model_dir)
        dtype = choose_dtype(config.dtype, self._device)
        self._decoder = FusedDecoder(spec, Checkpoint(config.model_dir), dtype=dtype, device=self._device)
        self.num_blocks = _num_blocks(config, spec, dtype, self._device)
        self.context_length = min(spec.max_positions, self.num_blocks * BLOCK_SIZE)
        self.eos_ids = spec.eos_ids
        self.num_host_blocks = int(config.kv_swap_gib * 2**30 // spec.kv_bytes(BLOCK_SIZE, dtype.itemsize))
        self._cache = KVCache(
            spec,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            device=self._device,
            num_host_blocks=self.num_host_blocks,
        )
        self._decode_of = _decode_of(self._device)
        self._lanes = torch.get_num_threads() if self._device.type == "cpu" else 1
        self._pool = ThreadPoolExecutor(self._lanes, "lane", functools.partial(torch.set_num_threads, 1))

    def execute(self, plan: StepPlan) -> list[int]:
        """Move blocks, compute the step; one token id for each chunk that samples, in the plan's order."""
        if plan.moves:
            self._move(plan.moves)
        chunks = plan.chunks
        shares = share(chunks, self._lanes)
        lanes = [[chunks[index] for index in indices] for indices in shares]
        token_of: dict[int, int] = {}
        for indices, token_ids in zip(shares, self._pool.map(self._compute, lanes), strict=True):
            sampling = [index for index in indices if chunks[index].sampling is not None]
            token_of.update(zip(sampling, token_ids, strict=True))
        return [token_of[index] for index in sorted(token_of)]

    @torch.inference_mode()
    def _move(self, moves: Moves) -> None:
        self._cache.move(moves)

    def close(self) -> None:
        self._pool.shutdown()

    @torch.inference_mode()
    def _compute(self, chunks: Sequence[Chunk]) -> list[int]:
        """Token ids of the chunks that sample, in order."""
        tokens = torch.tensor([token for chunk in chunks for token in chunk.token_ids], device=self._device)
        positions = torch.tensor(
            [chunk.start + offset for chunk in chunks for offset in range(len(chunk.token_ids))], device=self._device
        )
        hidden = self._decoder.forward(tokens, positions, PagedAttention(self._cache, chunks, self._decode_of))
        rows, samplings, next_positions, end = [], [], [], 0
        for chunk in chunks:
            end += len(chunk.token_ids)
            if chunk.sampling is not None:
                rows.append(end - 1)
                samplings.append(chunk.sampling)
                next_positions.append(chunk.start + len(chunk.token_ids))
        if not rows:
            return []
        logits = self._decoder.logits(hidden[torch.tensor(rows, device=self._device)])
        token_ids: list[int] = sample(logits, samplings, next_positions).tolist()
        return token_ids


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


def share(chunks: Sequence[Chunk], lanes: int) -> list[list[int]]:
    """Indices of the chunks that each lane computes, in the plan's order; as equal in cost as whole chunks allow.

    The dearest chunk first goes to the lane that has least. A token through the linear layers costs as much as
    attention over 20 positions (135 M parameters, bf16, one core of a Xeon with AMX: 140 μs and 7 μs).
    """
    costs = [20 * len(chunk.token_ids) + chunk.start + len(chunk.token_ids) for chunk in chunks]
    lanes = max(1, min(lanes, sum(len(chunk.token_ids) for chunk in chunks) // MIN_LANE_TOKENS))
    loads = [0] * lanes
    shares: list[list[int]] = [[] for _ in range(lanes)]
    for index in sorted(range(len(chunks)), key=costs.__getitem__, reverse=True):
        lane = loads.index(min(loads))
        loads[lane] += costs[index]
        shares[lane].append(index)
    return [sorted(indices) for indices in shares if indices]


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


def _decode_of(device: torch.device) -> Callable[..., Decode]:
    if device.type == "cpu":
        return BlockDecode
    # Here, not above: a CPU needs no Triton, whose import takes a second.
    from engine.kernel_decode import KernelDecode

    return KernelDecode
