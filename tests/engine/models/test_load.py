"""Loading a model directory: what is refused, by name, and what is kept from one start to the next."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.errors import ModelError
from engine.models import contract, verdict
from engine.models.decoder import Decoder
from engine.models.load import find_verdict, load_model
from tests.engine.models.families import LLAMA3, TINY
from tests.engine.packed import CPU, Sequences


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost such small models more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., LlamaForCausalLM]:
    """Writes a random tiny Llama in fp32 to tmp_path, and returns it."""

    def save(**changes: Any) -> LlamaForCausalLM:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**(TINY | changes))).eval()
        model.save_pretrained(tmp_path)
        return model

    return save


def load(directory: Path) -> Decoder:
    return load_model(directory, dtype=torch.float32, device=CPU).decoder


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_shards_load_like_one_file(save_model: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    model = save_model()
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert not (tmp_path / "shards/model.safetensors").exists()
    logits = []
    for directory in (tmp_path, tmp_path / "shards"):
        sequences = Sequences(load(directory), [(0, 1)])
        sequences.step({0: [5, 6, 7]})
        logits.append(torch.stack(sequences.logits[0]))
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "echo-2"}, "transformers does not know this config.json"),
        ({"model_type": None}, "names no model_type"),
        ({"model_type": "t5"}, "'t5' is not supported: it is no causal language model"),
        ({"model_type": "gemma3"}, "'gemma3' is not supported: it takes more than text"),
        (
            {"model_type": "diffllama", "architectures": None},
            "diffllama is refused: layer 0 calls the registered attention twice",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "'llama' is not supported as LlamaForSequenceClassification, only as LlamaForCausalLM",
        ),
        ({"auto_map": {"AutoModelForCausalLM": "model.Model"}}, "remote code is never run"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 4}, "6 heads with 4 KV heads"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "rope_parameters"),
        ({"num_hidden_layers": 4}, r"the weights lack model\.layers\.3\."),
        ({"num_hidden_layers": 2}, r"the weights hold model\.layers\.2\."),
        ({"intermediate_size": 81}, r"gate_proj.weight is \[80, 48\], config.json asks for \[81, 48\]"),
    ],
)
def test_a_model_that_is_not_what_we_compute_is_refused(
    changes: dict[str, Any], message: str, save_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    save_model()
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_pickled_weights_are_refused_by_name(save_model: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    save_model()
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        load(tmp_path)


def test_broken_files_are_refused_in_one_sentence(save_model: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    save_model()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match=r"holds no model\.safetensors"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match="No such file"):
        load(tmp_path)


def test_an_index_cannot_name_files_elsewhere(save_model: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    save_model()
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside the model directory"):
        load(tmp_path)


def test_older_configurations_name_the_rotary_base_at_the_top(
    save_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    save_model(rope_parameters=LLAMA3 | {"rope_theta": 500.0})
    new = find_verdict(tmp_path).spec
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 500.0, "rope_scaling": scaling}))
    assert find_verdict(tmp_path).spec == new


def test_eos_ids_come_from_the_generation_config_first(
    save_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    save_model()
    for content, expected in (('{"eos_token_id": [2, 7]}', {2, 7}), ("{}", {2})):
        (tmp_path / "generation_config.json").write_text(content)
        assert load_model(tmp_path, dtype=torch.float32, device=CPU).eos_ids == expected
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path, dtype=torch.float32, device=CPU).eos_ids == {2}  # the default of the model type


def test_a_context_ends_where_its_frequencies_would_change(
    save_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 48, "factor": 2.0}
    save_model(rope_parameters=longrope | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4})
    assert load(tmp_path).shape.context_length == 48


def test_a_verdict_is_kept_until_the_configuration_changes(
    save_model: Callable[..., LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[Path] = []

    def judge(directory: Path) -> verdict.Verdict:
        judged.append(directory)
        return original(directory)

    original = contract.judge
    monkeypatch.setattr(contract, "judge", judge)
    save_model()
    first = find_verdict(tmp_path)
    assert find_verdict(tmp_path) == first
    assert len(judged) == 1
    edit_config(tmp_path, auto_mapped=False)
    assert find_verdict(tmp_path) == first
    assert len(judged) == 2
    (tmp_path / verdict.FILE).write_text('{"key": 1}')
    find_verdict(tmp_path)
    assert len(judged) == 3


def test_a_refusal_is_kept_too(save_model: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    save_model()
    edit_config(tmp_path, model_type="diffllama", architectures=None)
    with pytest.raises(ModelError) as first:
        find_verdict(tmp_path)
    with pytest.raises(ModelError) as second:
        verdict.recall(tmp_path)
    assert str(first.value) == str(second.value)


def test_a_verdict_that_cannot_be_kept_is_still_given(
    save_model: Callable[..., LlamaForCausalLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_model()
    monkeypatch.setattr(verdict, "FILE", "no/such/directory")
    with caplog.at_level(logging.WARNING):
        assert find_verdict(tmp_path).path == "fused"
    assert "each start tests the model again" in caplog.text


def test_a_start_with_a_kept_verdict_imports_no_transformers(
    save_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    save_model()
    find_verdict(tmp_path)
    program = (
        "import pathlib, sys, torch\n"
        "from engine.models.load import load_model\n"
        f"load_model(pathlib.Path({str(tmp_path)!r}), dtype=torch.float32, device=torch.device('cpu'))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_weights_that_the_configuration_does_not_have_are_refused(
    model_type: str, save_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    save_model()
    if model_type == "gpt2":  # the general path, over weights of another type
        edit_config(tmp_path, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    else:
        edit_config(tmp_path, attention_bias=True)
    with pytest.raises(ModelError, match="the weights lack"):
        load(tmp_path)
