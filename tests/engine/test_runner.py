from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.request import Sampling
from engine.runner import BLOCK_SIZE, MIN_LANE_TOKENS, ModelRunner, share
from engine.step import Chunk, pack

GREEDY = Sampling(max_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Llama whose logits are far apart."""
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=[2, 5],
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def runner(model_dir: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner(make_config(model_dir))
    yield runner
    runner.close()


def make_config(model_dir: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(model_dir, **{"dtype": "float32", "kv_cache_gib": 0.001} | changes)


def make_chunk(
    name: str, token_ids: list[int], *, start: int = 0, blocks: tuple[int, ...], sampling: Sampling | None = GREEDY
) -> Chunk:
    return Chunk(name, tuple(token_ids), start, blocks, sampling)


def test_tokens_come_in_the_plans_order_from_chunks_that_sample(runner: ModelRunner) -> None:
    draw = random.Random(1)
    prompts = [[draw.randrange(300) for _ in range(length)] for length in (3, 40, 9, 17, 6, 30)]
    chunks = [
        make_chunk(str(index), prompt, blocks=(2 * index, 2 * index + 1), sampling=None if index == 2 else GREEDY)
        for index, prompt in enumerate(prompts)
    ]
    alone = [runner.execute(pack(1, (chunk,), block_size=BLOCK_SIZE)) for chunk in chunks]
    assert alone[2] == []
    together = runner.execute(pack(2, tuple(chunks), block_size=BLOCK_SIZE))
    assert together == [token for tokens in alone for token in tokens]
    assert len(set(together)) > 1


def test_a_preempted_sequence_computed_again_elsewhere_goes_on_the_same(runner: ModelRunner) -> None:
    prompt = list(range(50, 90))
    first = runner.execute(pack(1, (make_chunk("a", prompt, blocks=(0, 1)),), block_size=BLOCK_SIZE))
    second = runner.execute(pack(2, (make_chunk("a", first, start=40, blocks=(0, 1)),), block_size=BLOCK_SIZE))
    again = make_chunk("a", prompt + first, blocks=(7, 3))
    assert runner.execute(pack(3, (again,), block_size=BLOCK_SIZE)) == second


def test_the_pool_is_as_large_as_its_memory(model_dir: Path) -> None:
    block_bytes = 2 * 2 * 2 * 8 * BLOCK_SIZE * 4  # keys and values, layers, KV heads, head_dim, positions, fp32
    runner = ModelRunner(make_config(model_dir, kv_cache_gib=5.5 * block_bytes / 2**30))
    assert runner.num_blocks == 5
    assert runner.context_length == 5 * BLOCK_SIZE
    assert runner.eos_ids == {2, 5}
    runner.close()
    with pytest.raises(ModelError, match=r"kv_cache_gib .* leaves no memory for a single KV block"):
        ModelRunner(make_config(model_dir, kv_cache_gib=0.9 * block_bytes / 2**30))


def test_context_is_what_the_model_was_trained_for(runner: ModelRunner) -> None:
    assert runner.context_length == 512


def test_lanes_share_a_step_by_its_cost() -> None:
    long = [Chunk(str(index), (1,), 1000, (), GREEDY) for index in range(4)]
    short = [Chunk(str(index), (1,), 10, (), GREEDY) for index in range(12)]
    shares = share([*long, *short], lanes=2)
    assert [sum(index < 4 for index in lane) for lane in shares] == [2, 2]
    assert sorted(index for lane in shares for index in lane) == list(range(16))
    assert all(lane == sorted(lane) for lane in shares)


def test_few_tokens_take_one_lane() -> None:
    chunks = [Chunk(str(index), (1,), 5, (), GREEDY) for index in range(3 * MIN_LANE_TOKENS)]
    assert [len(share(chunks[:count], lanes=3)) for count in (1, 2 * MIN_LANE_TOKENS - 1)] == [1, 1]
    assert [len(share(chunks[:count], lanes=3)) for count in (2 * MIN_LANE_TOKENS, len(chunks))] == [2, 3]


def test_one_piece_goes_to_one_lane() -> None:
    assert share([Chunk("a", tuple(range(99)), 0, (), GREEDY)], lanes=2) == [[0]]


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_a_token_does_not_depend_on_its_neighbours_or_lane(lanes: int, model_dir: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(lanes)
    try:
        runner = ModelRunner(make_config(model_dir))
    finally:
        torch.set_num_threads(threads)
    draw = random.Random(2)
    sampled = dataclasses.replace(GREEDY, temperature=1.0, seed=11)
    prompt = [draw.randrange(300) for _ in range(20)]
    me = make_chunk("me", prompt, blocks=(0,), sampling=sampled)
    alone = runner.execute(pack(1, (me,), block_size=BLOCK_SIZE))
    for number in range(2, 8):
        mates = [
            make_chunk(str(index), [draw.randrange(300) for _ in range(draw.randint(2, 30))], blocks=(index,))
            for index in range(1, number)
        ]
        assert runner.execute(pack(number, (*mates, me), block_size=BLOCK_SIZE))[-1:] == alone
    runner.close()


def test_auto_is_a_dtype_that_this_machine_multiplies(model_dir: Path) -> None:
    runner = ModelRunner(make_config(model_dir, dtype="auto"))
    assert runner.execute(pack(1, (make_chunk("a", [1, 2, 3], blocks=(0,)),), block_size=BLOCK_SIZE))
    runner.close()
