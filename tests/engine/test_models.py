"""The fused decoder against transformers' LlamaForCausalLM, on random tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.attention import BlockDecode, KVCache, PagedAttention
from engine.errors import ModelError
from engine.models.fused import FusedDecoder
from engine.models.spec import read_spec
from engine.models.weights import Checkpoint
from engine.request import Sampling
from engine.step import Chunk, pack

CPU = torch.device("cpu")
BLOCK_SIZE = 4
TINY: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # large, so that attention is far from uniform and mistakes show
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
CONFIGS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "no-groups": {"num_key_value_heads": 6},
    "one-kv-head": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 20},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


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
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero by default
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(tmp_path, max_shard_size=changes.get("max_shard_size", "5GB"))
        return model

    return save


def load(directory: Path) -> FusedDecoder:
    return FusedDecoder(read_spec(directory), Checkpoint(directory), dtype=torch.float32, device=CPU)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class Sequences:
    """Several sequences on one paged cache, fed in steps; keeps the logits of every position."""

    def __init__(self, decoder: FusedDecoder, tables: list[tuple[int, ...]]) -> None:
        self._decoder = decoder
        self._tables = tables
        num_blocks = max(max(table) for table in tables) + 1
        self._cache = KVCache(
            decoder.spec, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU
        )
        self._done = [0] * len(tables)
        self.logits: list[list[torch.Tensor]] = [[] for _ in tables]

    @torch.inference_mode()
    def step(self, pieces: dict[int, list[int]]) -> None:
        """Compute the next tokens of some sequences, decodes first."""
        chunks = [
            Chunk(str(index), tuple(tokens), self._done[index], self._tables[index], Sampling(max_tokens=1))
            for index, tokens in sorted(pieces.items(), key=lambda piece: len(piece[1]) > 1)
        ]
        plan = pack(1, chunks, block_size=BLOCK_SIZE)
        tokens, positions = torch.tensor(plan.token_ids), torch.from_numpy(plan.positions)
        attention = PagedAttention(self._cache, plan, BlockDecode)
        rows = iter(self._decoder.logits(self._decoder.forward(tokens, positions, attention)))
        for chunk in chunks:
            self.logits[int(chunk.request_id)] += [next(rows) for _ in chunk.token_ids]
            self._done[int(chunk.request_id)] += len(chunk.token_ids)


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(
    "tables",
    [
        [tuple(range(0, 6)), tuple(range(6, 12)), tuple(range(12, 18))],
        [(11, 2, 17, 5, 8, 14), (0, 16, 3, 9, 6, 12), (1, 15, 10, 4, 13, 7)],
    ],
    ids=["neighbouring-blocks", "scattered-blocks"],
)
def test_chunked_prefill_and_decode_agree_with_transformers(
    changes: dict[str, Any], tables: list[tuple[int, ...]], save_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    model = save_model(**changes)
    tokens = torch.randint(3, TINY["vocab_size"], (3, 22), generator=torch.Generator().manual_seed(1)).tolist()
    sequences = Sequences(load(tmp_path), tables)

    sequences.step({0: tokens[0][:7], 1: tokens[1][:1]})  # prefills, one of a single token
    sequences.step({0: tokens[0][7:12], 1: tokens[1][1:9], 2: tokens[2][:4]})  # pieces that go on, and a whole block
    sequences.step({0: tokens[0][12:13], 1: tokens[1][9:18], 2: tokens[2][4:5]})  # decodes beside a piece
    for position in range(13, 22):  # decodes alone, over the edges of blocks
        sequences.step({0: [tokens[0][position]], 2: [tokens[2][position - 8]]})

    for index, logits in enumerate(sequences.logits):
        with torch.inference_mode():
            truth = model(torch.tensor([tokens[index][: len(logits)]])).logits[0]
        error = (torch.stack(logits) - truth).abs().max() / truth.abs().max()
        assert error <= 1e-5, f"sequence {index}: relative error {error:.1e}"


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
        ({"model_type": "mistral"}, "model type 'mistral' is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "model type 'llama' is not supported"),
        ({"auto_map": {"AutoModelForCausalLM": "model.Model"}}, "remote code is never run"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rotary embedding 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "lacks 'low_freq_factor'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 4}, "6 heads of 8 with 4 KV heads"),
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
    save_model()
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 500.0, "rope_scaling": scaling}))
    spec = read_spec(tmp_path)
    assert spec.rope_theta == 500.0
    assert spec.rope_scaling is not None
    assert spec.rope_scaling.original_positions == 24


def test_eos_ids_come_from_the_generation_config_first(
    save_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    save_model()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert read_spec(tmp_path).eos_ids == {2, 7}
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_spec(tmp_path).eos_ids == {2}
