"""What a model is: read from its config.json, refused by name where we would compute something else.

Only the Llama architecture is known. Nothing in a model directory is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 stretches its rotary frequencies to a longer context (arXiv 2407.21783)."""

    factor: float
    """Low frequencies are divided by it."""
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    """The context length before the stretch."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A Llama decoder in numbers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_positions: int
    """Positions the model was trained for: prompt and output together."""
    tied: bool
    """The embedding is the output layer too."""
    attention_bias: bool
    mlp_bias: bool
    eos_ids: frozenset[int]

    def kv_bytes(self, positions: int, itemsize: int) -> int:
        """Bytes of keys and values of all layers for so many positions."""
        return 2 * self.layers * self.kv_heads * self.head_dim * positions * itemsize


def read_spec(directory: Path) -> ModelSpec:
    """The spec of the model in `directory`.

    Raises ModelError if there is no readable config.json, or if it describes anything but a plain Llama.
    """
    config = read_json(directory / "config.json")
    _refuse_what_is_not_llama(config, directory)
    heads = _positive(config, "num_attention_heads")
    kv_heads = _positive(config, "num_key_value_heads", default=heads)
    hidden_size = _positive(config, "hidden_size")
    head_dim = _positive(config, "head_dim", default=max(1, hidden_size // heads))
    if heads % kv_heads or head_dim % 2:
        raise ModelError(f"{directory}: {heads} heads of {head_dim} with {kv_heads} KV heads make no Llama model")
    theta, scaling = _rope(config)
    return ModelSpec(
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        layers=_positive(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=_positive(config, "max_position_embeddings", default=2048),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_ids=_eos_ids(config, directory),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelError if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def _refuse_what_is_not_llama(config: Mapping[str, Any], directory: Path) -> None:
    model_type = config.get("model_type")
    if "auto_map" in config:
        raise ModelError(f"{directory}: the model brings its own code (auto_map), and remote code is never run")
    if model_type != "llama" or "LlamaForCausalLM" not in (config.get("architectures") or ["LlamaForCausalLM"]):
        raise ModelError(f"{directory}: model type {model_type!r} is not supported, only 'llama' is")
    if config.get("quantization_config"):
        raise ModelError(f"{directory}: quantized weights (quantization_config) are not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{directory}: activation {config['hidden_act']!r} is not supported, only 'silu' is")


def _positive(config: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}, not a positive number")
    return value


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling; transformers 5 keeps both in rope_parameters, earlier files in rope_theta and rope_scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or kind not in ("default", "llama3"):
        raise ModelError(f"config.json: rotary embedding {kind!r} is not supported, only 'default' and 'llama3' are")
    if kind == "default":
        return theta, None
    try:
        return theta, Llama3Scaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_positions=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ModelError(f"config.json: rotary embedding 'llama3' lacks {error}") from error


def _eos_ids(config: Mapping[str, Any], directory: Path) -> frozenset[int]:
    """End-of-sequence ids; generation_config.json is the later word, as in transformers."""
    generation = directory / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if eos is None:
        eos = config.get("eos_token_id")
    return frozenset([eos] if isinstance(eos, int) else eos or [])
