"""From a model of transformers to the ModelSpec that the fused decoder computes.

Numbers come from the configuration, structure from the module: which norms, biases and merged tensors a layer has is
read from a layer. Whether the description says all, engine.models.contract tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.models.fused import NORM_NAMES
from engine.models.spec import Activation, LayerSpec, ModelSpec, Norms, Rope
from engine.shape import Scoring, Shape

FAMILIES = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
    *("phi3", "granite", "olmo2", "olmo3", "smollm3", "seed_oss"),
)
"""Model types whose code was read. A list, although the contract would find most others out: what shows only at a
position that no short test reaches (say, scores that are scaled after the first 8192) it would not."""

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


class NotDescribed(Exception):
    """The fused decoder has no words for this model; the message says for what of it."""


def context_length(config: Any) -> int:
    """Positions for which the rotary frequencies, and all else, are those of the first position.

    Frequencies of kind "longrope" change for whole sequences that grow beyond the original context, also those of
    keys that are cached already; such models are served up to there. "dynamic" ones change beyond
    max_position_embeddings, where every model ends.
    """
    length = getattr(config, "max_position_embeddings", None) or 2048
    for rope in _rope_parameters(config):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            length = min(length, original or getattr(config, "original_max_position_embeddings", None) or length)
    return int(length)


def describe(config: Any, model: Any) -> ModelSpec:
    """What the fused decoder must compute for `config`.

    model  a module of the same type, whose structure and head_dim are those of `config`, if not its size
    Raises NotDescribed if it could not.
    """
    if config.model_type not in FAMILIES:
        raise NotDescribed(f"its type {config.model_type!r} is none that the fused decoder knows")
    layer = model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    is_merged = hasattr(attention, "qkv_proj")
    first, up = (attention.qkv_proj, mlp.gate_up_proj) if is_merged else (attention.q_proj, mlp.up_proj)
    kinds, ropes = _ropes(config, model)
    return ModelSpec(
        shape=_shape(config, attention.head_dim),
        layers=tuple(
            LayerSpec(Scoring(float(attention.scaling), window, _number(config, "attn_logit_softcapping")), rope)
            for window, rope in zip(_windows(config), kinds, strict=True)
        ),
        ropes=ropes,
        norms=_norms(layer),
        norm_eps=config.rms_norm_eps,
        norm_offset=1.0 if config.model_type.startswith("gemma") else 0.0,
        head_norm=_head_norm(attention),
        activation=_activation(config),
        is_tied=bool(config.tie_word_embeddings),
        is_merged=is_merged,
        qkv_bias=first.bias is not None,
        output_bias=attention.o_proj.bias is not None,
        mlp_bias=up.bias is not None,
        embedding_multiplier=_embedding_multiplier(config),
        residual_multiplier=_number(config, "residual_multiplier") or 1.0,
        logits_multiplier=1 / (_number(config, "logits_scaling") or 1.0),
        logits_cap=_number(config, "final_logit_softcapping"),
    )


def _shape(config: Any, head_dim: int) -> Shape:
    return Shape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        context_length=context_length(config),
    )


def _windows(config: Any) -> list[int | None]:
    """The window of each layer."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    if strange := set(kinds) - {"sliding_attention", "full_attention"}:
        raise NotDescribed(f"layers of kind {min(strange)!r} are none that the fused decoder knows")
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _ropes(config: Any, model: Any) -> tuple[list[int | None], tuple[Rope, ...]]:
    """Which rotary embedding each layer has, and these, by the formulas of transformers."""
    # A module of its own, made for this configuration: the model's may be smaller.
    rotary = type(model.model.rotary_emb)(config)
    if "rope_type" in config.rope_parameters:
        ropes = [Rope(tuple(rotary.inv_freq.tolist()), float(rotary.attention_scaling))]
        chosen = [0] * config.num_hidden_layers
    else:
        kinds = sorted(set(config.layer_types))
        ropes = [
            Rope(tuple(getattr(rotary, f"{kind}_inv_freq").tolist()), getattr(rotary, f"{kind}_attention_scaling"))
            for kind in kinds
        ]
        chosen = [kinds.index(kind) for kind in config.layer_types]
    # Named for what it is not: 1 means that the layer has one.
    has = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    return [rope if is_there else None for rope, is_there in zip(chosen, has, strict=True)], tuple(ropes)


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Those of each kind of layer, or the only ones."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (value for value in parameters.values() if isinstance(value, dict))


def _norms(layer: Any) -> Norms:
    names = {name for name, _ in layer.named_children() if name.endswith("norm")}
    for place, wanted in NORM_NAMES.items():
        if names == {name for name in wanted if name}:
            return place
    raise NotDescribed(f"its layers have the norms {', '.join(sorted(names))}")


def _head_norm(attention: Any) -> Any:
    norm = getattr(attention, "q_norm", None)
    if norm is None:
        return None
    return "head" if tuple(norm.weight.shape) == (attention.head_dim,) else "all"


def _activation(config: Any) -> Activation:
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in _ACTIVATIONS:
        raise NotDescribed(f"activation {name!r} is none that the fused decoder knows")
    return _ACTIVATIONS[name]


def _embedding_multiplier(config: Any) -> float:
    if config.model_type.startswith("gemma"):
        return float(config.hidden_size**0.5)
    return _number(config, "embedding_multiplier") or 1.0


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return None if value is None else float(value)
