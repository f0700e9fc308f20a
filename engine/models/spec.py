"""What a model is, in numbers: for every model its shape, and for the fused decoder all that it computes.

No torch and no transformers here, so that the process that serves jobs can refuse a directory at once. Nothing in a
model directory is ever executed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from engine.errors import ModelError
from engine.shape import Scoring, Shape

Norms = Literal["pre", "post", "sandwich"]
"""Where a layer normalises: before attention and MLP (Llama), behind them (OLMo 2), or both (Gemma 2)."""
Activation = Literal["silu", "gelu", "gelu_tanh"]
"""What the gate of the MLP goes through."""


class Rope(NamedTuple):
    """A rotary embedding, whatever formula its frequencies came from."""

    frequencies: tuple[float, ...]
    """Radians a position of each pair of dimensions, fp32 values; dimensions behind the last pair are not turned."""
    amplitude: float = 1.0
    """Cosines and sines are multiplied by it."""


class LayerSpec(NamedTuple):
    """In what a layer differs from its neighbours."""

    scoring: Scoring
    rope: int | None
    """Which of the model's rotary embeddings; None: positions are not applied."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of the family that Llama began, as the fused path computes it."""

    shape: Shape
    layers: tuple[LayerSpec, ...]
    ropes: tuple[Rope, ...]
    norms: Norms
    norm_eps: float
    norm_offset: float
    """Added to the weights of every norm: 1 where they are kept as differences from it (Gemma), else 0."""
    head_norm: Literal["head", "all"] | None
    """Queries and keys are normalised per head, or all heads together, before they are turned; None: not at all."""
    activation: Activation
    is_tied: bool
    """The embedding is the output layer too."""
    is_merged: bool
    """The file keeps query, key and value, and gate and up, as one tensor each (Phi-3)."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    embedding_multiplier: float
    residual_multiplier: float
    """What attention and MLP add is multiplied by it."""
    logits_multiplier: float
    logits_cap: float | None
    """c · tanh(logits / c); None: not capped."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ModelSpec:
        """The spec that dataclasses.asdict made `value` of, also after a trip through JSON."""
        layers = tuple(LayerSpec(Scoring(*scoring), rope) for scoring, rope in value["layers"])
        ropes = tuple(Rope(tuple(frequencies), amplitude) for frequencies, amplitude in value["ropes"])
        return cls(**value | {"shape": Shape(**value["shape"]), "layers": layers, "ropes": ropes})


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises ModelError if it is unreadable, or no model that we would ever run."""
    config = read_json(directory / "config.json")
    if "auto_map" in config:
        raise ModelError(f"{directory}: the model brings its own code (auto_map), and remote code is never run")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{directory}: config.json names no model_type")
    if config.get("quantization_config"):
        raise ModelError(f"{directory}: quantized weights (quantization_config) are not supported")
    return config


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


def read_eos_ids(directory: Path) -> frozenset[int] | None:
    """End-of-sequence ids of generation_config.json, the later word, else of config.json; None if neither has any."""
    generation = directory / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if eos is None:
        eos = read_json(directory / "config.json").get("eos_token_id")
    if eos is None:
        return None
    return frozenset([eos] if isinstance(eos, int) else eos)
