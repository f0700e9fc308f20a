"""A model's tiny twin: random weights, the same type and description, sizes that a test can afford."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

HEADS = 4
MAX_KINDS = 8
"""Layers of so many different kinds are kept."""
_LIMITS: Mapping[str, int] = {
    # Windows that a test of a dozen tokens reaches the end of.
    "sliding_window": 5,
    "attention_chunk_size": 6,
    "window_size": 5,
    # Widths of MLPs and experts, and how many of these.
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "n_group"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2),
}
"""Numbers of configurations, and what they are at most in a twin."""
_RECURRENT_HEADS = (("mamba_n_heads", "mamba_d_head"), ("n_mamba_heads", "mamba_headdim"), ("num_heads", "head_dim"))
"""Numbers and sizes of heads whose product is a multiple of the hidden size. Such layers are refused, but by name."""
_WIDTHS = ("word_embed_proj_dim", "embedding_size", "conv_dim", "block_dim", "lru_width", "attention_hidden_size")
"""Where they equal the hidden size, they do so in a twin."""
VOCABULARY = 96


@dataclass(frozen=True, slots=True)
class Twin:
    """A tiny random model in fp32, on the CPU."""

    config: Any
    model: Any
    layers: tuple[int, ...]
    """Which layers of the original its layers are."""


def make_twin(config: Any) -> Twin:
    """The twin of a configuration of transformers. Raises whatever transformers does if it cannot make it."""
    layers = _layers(config)
    tiny = shrink(config, layers)
    with torch.random.fork_rng(devices=[]):
        make: Any = AutoModelForCausalLM.from_config
        model = make(tiny, dtype=torch.float32, attn_implementation="eager")
    randomize(model.eval())
    return Twin(tiny, model, layers)


def shrink(config: Any, layers: tuple[int, ...]) -> Any:
    """The same configuration with these layers only, and small numbers where they describe nothing but size."""
    tiny, old_layers, old_width = copy.deepcopy(config), config.num_hidden_layers, config.hidden_size
    heads = getattr(config, "num_attention_heads", None) or HEADS
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # Kept, because frequencies, scales and the width of caches hang on it.
    head_dim = getattr(config, "head_dim", None) or old_width // heads
    width = HEADS * head_dim // (1 if heads * head_dim == old_width else 2)
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == old_layers > 1:
            _set(tiny, name, type(value)(value[layer] for layer in layers))
        elif name in _LIMITS and type(value) is int:
            _set(tiny, name, min(value, _LIMITS[name]))
        elif name in _WIDTHS and value == old_width:
            _set(tiny, name, width)
        elif name.endswith("_token_id") and isinstance(value, int):
            _set(tiny, name, 0)
    for name, limit in _LIMITS.items():  # names that stand for others
        if name not in vars(config) and type(value := getattr(config, name, None)) is int:
            _set(tiny, name, min(value, limit))
    _set(tiny, "num_hidden_layers", len(layers))
    _set(tiny, "hidden_size", width)
    _set(tiny, "vocab_size", VOCABULARY)
    if hasattr(config, "num_attention_heads"):
        _set(tiny, "num_attention_heads", HEADS)
    if hasattr(config, "num_key_value_heads"):
        _set(tiny, "num_key_value_heads", HEADS if kv_heads == heads else min(kv_heads, HEADS // 2))
    for count, size in _RECURRENT_HEADS:
        expansion = getattr(config, "mamba_expand", None) or getattr(config, "expand", None)
        if expansion and isinstance(getattr(config, count, None), int):
            _set(tiny, count, int(expansion * width) // getattr(config, size))
    return tiny


def _layers(config: Any) -> tuple[int, ...]:
    """The first layer of each kind, and two at least. Kinds are told apart by all that is listed layer by layer."""
    count = config.num_hidden_layers
    lists = [value for value in vars(config).values() if isinstance(value, list | tuple) and len(value) == count]
    kinds = {repr([value[layer] for value in lists]): layer for layer in reversed(range(count))}
    first = sorted(kinds.values())[:MAX_KINDS]
    return tuple(first) if len(first) > 1 or count == 1 else (0, 1)


def _set(config: Any, name: str, value: object) -> None:
    if getattr(config, name, None) != value:
        setattr(config, name, value)


def randomize(model: Any) -> None:
    """Weights that show mistakes: large enough that attention is far from even, biases and norms unlike their start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(noise, alpha=0.2)
            elif "embed" in name or "wte" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * (1.0 / parameter.shape[-1] ** 0.5))
