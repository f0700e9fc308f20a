from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.request import Sampling
from engine.runner import BLOCK_SIZE, ModelRunner
from engine.step import Chunk, pack

GREEDY = Sampling(max_tokens=1, temperature=0.0)


@pytest.fixture
def runner(llama_dir: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner(make_config(llama_dir))
    yield runner
    runner.close()


def make_config(llama_dir: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(llama_dir, **{"dtype": "float32", "kv_cache_gib": 0.001} | changes)


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
    alone = [runner.execute(pack(1, (chunk,), block_size=BLOCK_SIZE)).token_ids for chunk in chunks]
    assert alone[2] == []
    together = runner.execute(pack(2, tuple(chunks), block_size=BLOCK_SIZE)).token_ids
    assert together == [token for tokens in alone for token in tokens]
    assert len(set(together)) > 1


def test_a_preempted_sequence_computed_again_elsewhere_goes_on_the_same(runner: ModelRunner) -> None:
    prompt = list(range(50, 90))

    def run(*chunk: Chunk) -> list[int]:
        return runner.execute(pack(1, chunk, block_size=BLOCK_SIZE)).token_ids

    first = run(make_chunk("a", prompt, blocks=(0, 1)))
    second = run(make_chunk("a", first, start=40, blocks=(0, 1)))
    assert run(make_chunk("a", prompt + first, blocks=(7, 3))) == second


def test_the_pool_is_as_large_as_its_memory(llama_dir: Path) -> None:
    block_bytes = 2 * 2 * 2 * 8 * BLOCK_SIZE * 4  # keys and values, layers, KV heads, head_dim, positions, fp32
    runner = ModelRunner(make_config(llama_dir, kv_cache_gib=5.5 * block_bytes / 2**30))
    assert runner.num_blocks == 5
    assert runner.context_length == 5 * BLOCK_SIZE
    assert runner.eos_ids == {2, 5}
    runner.close()
    with pytest.raises(ModelError, match=r"kv_cache_gib .* leaves no memory for a single KV block"):
        ModelRunner(make_config(llama_dir, kv_cache_gib=0.9 * block_bytes / 2**30))


def test_context_is_what_the_model_was_trained_for(runner: ModelRunner) -> None:
    assert runner.context_length == 512


def test_a_token_does_not_depend_on_its_neighbours(runner: ModelRunner) -> None:
    draw = random.Random(2)
    sampled = dataclasses.replace(GREEDY, temperature=1.0, seed=11)
    prompt = [draw.randrange(300) for _ in range(20)]
    me = make_chunk("me", prompt, blocks=(0,), sampling=sampled)
    alone = runner.execute(pack(1, (me,), block_size=BLOCK_SIZE)).token_ids
    for number in range(2, 8):
        mates = [
            make_chunk(str(index), [draw.randrange(300) for _ in range(draw.randint(2, 30))], blocks=(index,))
            for index in range(1, number)
        ]
        assert runner.execute(pack(number, (*mates, me), block_size=BLOCK_SIZE)).token_ids[-1:] == alone


def test_auto_is_a_dtype_that_this_machine_multiplies(llama_dir: Path) -> None:
    runner = ModelRunner(make_config(llama_dir, dtype="auto"))
    assert runner.execute(pack(1, (make_chunk("a", [1, 2, 3], blocks=(0,)),), block_size=BLOCK_SIZE))
    runner.close()
