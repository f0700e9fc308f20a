"""The contract itself: what it lets pass on configurations of full size, and that it notices what it should."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.errors import ModelError
from engine.models import contract, generic
from engine.models.contract import judge_config
from engine.models.spec import ModelSpec
from engine.models.twin import make_twin
from tests.engine.models.families import FUSED, Case


def scored(**changes: Any) -> Callable[[ModelSpec], dict[str, Any]]:
    """The same scoring but for these, in all layers."""
    return lambda spec: {
        "layers": tuple(layer._replace(scoring=layer.scoring._replace(**changes)) for layer in spec.layers)
    }


def turned(spec: ModelSpec) -> dict[str, Any]:
    """Positions in all layers."""
    return {"layers": tuple(layer._replace(rope=0) for layer in spec.layers)}


def louder(spec: ModelSpec) -> dict[str, Any]:
    return {"ropes": tuple(rope._replace(amplitude=1.0) for rope in spec.ropes)}


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("mistral", scored(window=None)),
        ("mistral", scored(window=4)),  # one less than the twin's
        ("gemma2", scored(soft_cap=None)),
        ("gemma2", scored(scale=0.25)),
        ("gemma2", lambda spec: {"norm_offset": 0.0}),
        ("gemma2", lambda spec: {"embedding_multiplier": 1.0}),
        ("gemma2", lambda spec: {"logits_cap": None}),
        ("gemma2", lambda spec: {"activation": "gelu"}),
        ("granite", lambda spec: {"residual_multiplier": 1.0}),
        ("granite", lambda spec: {"logits_multiplier": 1.0}),
        ("smollm3", turned),
        ("llama, yarn", louder),
        ("llama, llama3 rope", lambda spec: {"norm_eps": 1e-2}),
        ("qwen3", lambda spec: {"head_norm": None}),
        ("qwen2", lambda spec: {"qkv_bias": False}),
        ("llama, untied", lambda spec: {"is_tied": True}),
    ],
)
def test_a_description_with_a_mistake_is_not_used(
    name: str, mistake: Callable[[ModelSpec], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe(config: Any, model: Any) -> ModelSpec:
        spec = original(config, model)
        return dataclasses.replace(spec, **mistake(spec))

    original = contract.describe
    config = configuration(FUSED[name])
    assert judge_config(config).path == "fused"
    monkeypatch.setattr(contract, "describe", describe)
    verdict = judge_config(config)
    assert verdict.path == "generic"
    assert verdict.spec is None


def test_an_attention_that_mixes_sequences_is_noticed_at_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **given: Any) -> Any:
        out, weights = original(module, query, key, value, **given)
        if module.layer_idx == 1:
            out = out + 1e-3 * value.mean(dim=2, keepdim=True).mean()  # of all tokens of the batch
        return out, weights

    original = generic._attend
    monkeypatch.setitem(generic.AttentionInterface._global_mapping, generic.ATTENTION, attend)
    with pytest.raises(ModelError, match="gpt2 is refused: layer 1 computes something else in a batch than alone"):
        judge_config(configuration(Case("gpt2")))


FULL_SIZE = {
    **{"llama": "fused", "qwen3": "fused", "gemma3_text": "fused", "olmo3": "fused", "seed_oss": "fused"},
    **{"gpt_oss": "generic", "deepseek_v3": "generic", "qwen3_moe": "generic", "falcon": "refused"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "path"), FULL_SIZE.items())
def test_models_of_full_size_are_tested_by_twins_of_a_few_megabytes(model_type: str, path: str) -> None:
    config = AutoConfig.for_model(model_type)
    assert sum(parameter.numel() for parameter in make_twin(config).model.parameters()) < 30e6
    if path == "refused":
        with pytest.raises(ModelError, match="layer 0 calls the registered attention never"):
            judge_config(config)
    else:
        assert judge_config(config).path == path


def test_a_twin_has_a_layer_of_each_kind() -> None:
    twin = make_twin(AutoConfig.for_model("gemma3_text"))
    assert twin.layers == (0, 5)  # sliding, full
    assert twin.config.layer_types == ["sliding_attention", "full_attention"]


def configuration(case: Case) -> Any:
    return AutoConfig.for_model(case.model_type, **case.config)
