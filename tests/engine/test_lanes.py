from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.lanes import MIN_LANE_TOKENS, LaneError, Lanes, share
from engine.request import Sampling
from engine.runner import BLOCK_SIZE, ModelRunner
from engine.step import Chunk, Moves, Past, StepPlan, pack

GREEDY = Sampling(max_tokens=1, temperature=0.0)
EMPTY = np.zeros(0, dtype=np.int32)


@pytest.fixture(scope="module")
def config(llama_dir: Path) -> EngineConfig:
    return EngineConfig(llama_dir, dtype="float32", kv_cache_gib=0.002, kv_swap_gib=0.001)


@pytest.fixture(scope="module")
def lanes(config: EngineConfig) -> Iterator[Lanes]:
    lanes = Lanes(config, count=2)
    yield lanes
    lanes.close()


@pytest.fixture
def doomed(config: EngineConfig) -> Iterator[Lanes]:
    """Lanes that the test may kill."""
    lanes = Lanes(config, count=2)
    yield lanes
    lanes.close()


def processes_of(lanes: Lanes) -> list[psutil.Process]:
    first = psutil.Process(lanes._process.pid)
    return [first, *first.children()]


def make_plan(*chunks: Chunk, moves: Moves | None = None) -> StepPlan:
    plan = pack(1, chunks, block_size=BLOCK_SIZE)
    return replace(plan, moves=moves) if moves else plan


def make_chunk(name: str, token_ids: list[int], *, blocks: tuple[int, ...], start: int = 0, **changes: Any) -> Chunk:
    return Chunk(name, tuple(token_ids), start, blocks, replace(GREEDY, **changes))


def make_decodes(count: int, start: int) -> list[Chunk]:
    return [Chunk(str(index), (1,), start, (), GREEDY) for index in range(count)]


def share_of(chunks: list[Chunk], lanes: int) -> list[list[int]]:
    return share(make_plan(*chunks), lanes)


def test_lanes_share_a_step_by_its_cost() -> None:
    shares = share_of([*make_decodes(4, start=1000), *make_decodes(12, start=10)], lanes=2)
    assert [sum(index < 4 for index in lane) for lane in shares] == [2, 2]
    assert sorted(index for lane in shares for index in lane) == list(range(16))
    assert all(lane == sorted(lane) for lane in shares)


def test_few_tokens_take_one_lane() -> None:
    counts = [1, 2 * MIN_LANE_TOKENS - 1, 2 * MIN_LANE_TOKENS, 3 * MIN_LANE_TOKENS]
    assert [len(share_of(make_decodes(count, start=5), lanes=3)) for count in counts] == [1, 1, 2, 3]


def test_one_piece_goes_to_one_lane() -> None:
    assert share_of([Chunk("a", tuple(range(99)), 0, (), GREEDY)], lanes=2) == [[0]]


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_lanes_makes_the_tokens_of_one_process(count: int, config: EngineConfig) -> None:
    """Sequences change lanes between steps, and find what another lane has computed."""
    alone, lanes, rng = ModelRunner(config), Lanes(config, count=count), random.Random(count)
    assert (lanes.num_blocks, lanes.num_host_blocks) == (alone.num_blocks, alone.num_host_blocks)
    assert (lanes.block_size, lanes.context_length, lanes.eos_ids) == (BLOCK_SIZE, alone.context_length, alone.eos_ids)
    tokens = {name: [rng.randrange(300) for _ in range(rng.randint(2, 40))] for name in range(10)}
    computed = dict.fromkeys(tokens, 0)
    for _ in range(6):
        names = rng.sample(sorted(tokens), rng.randint(1, 10))
        names.sort(key=lambda name: len(tokens[name]) - computed[name] > 1)
        chunks = [
            make_chunk(
                str(name),
                tokens[name][computed[name] :],
                start=computed[name],
                blocks=(2 * name, 2 * name + 1),
                temperature=name % 2,
                seed=name,
                min_tokens=3,
                top_logprobs=name % 3 or None,
            )
            for name in names
        ]
        # What belongs to single chunks finds them again: of the last one nothing may come, of others what a mask says.
        pasts = {index: Past(0, (), EMPTY, EMPTY) for index in range(len(chunks))}
        masks = {index: np.full(10, 1 << index, dtype=np.int32) for index in range(0, len(chunks) - 1, 3)}
        plan = replace(make_plan(*chunks), pasts=pasts, masks=masks | {len(chunks) - 1: np.zeros(10, dtype=np.int32)})
        sampled = alone.execute(plan)
        of_lanes = lanes.execute(plan)
        assert (of_lanes.token_ids, of_lanes.errors) == (sampled.token_ids, sampled.errors)
        assert {place: logprob.token_id for place, logprob in of_lanes.logprobs.items()} == {
            place: logprob.token_id for place, logprob in sampled.logprobs.items()
        }
        assert sampled.errors.keys() == {len(chunks) - 1}
        assert sampled.logprobs.keys() == {place for place, name in enumerate(names) if name % 3}
        assert all(sampled.token_ids[index] % 32 == index for index in masks)
        for name, token_id in zip(names, sampled.token_ids, strict=True):
            computed[name] = len(tokens[name])
            tokens[name].append(token_id)
    lanes.close()


def test_blocks_are_moved_for_all_lanes(lanes: Lanes) -> None:
    prompt, mates = list(range(50, 70)), range(1, 9)
    first = lanes.execute(make_plan(make_chunk("a", prompt, blocks=(0,)))).token_ids
    decode = make_chunk("a", first, start=20, blocks=(0,))
    second = lanes.execute(make_plan(decode)).token_ids
    moves = Moves(swaps_out=((0, 3),), copies=((0, 20),), swaps_in=((3, 21),))
    others = [make_chunk(str(mate), [7, 8], blocks=(mate,)) for mate in mates]
    moved = [replace(decode, block_ids=(block,)) for block in (20, 21)]
    assert lanes.execute(make_plan(*moved, *others, moves=moves)).token_ids[:2] == second * 2


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path, config: EngineConfig) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        Lanes(replace(config, model_dir=tmp_path), count=2)


def test_what_fails_in_a_lane_is_raised(lanes: Lanes) -> None:
    beyond = make_chunk("a", [1, 2, 3], blocks=(lanes.num_blocks,))
    with pytest.raises(LaneError, match="IndexError"):
        lanes.execute(make_plan(beyond))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_lane_ends_the_engine_and_not_in_silence(victim: int, doomed: Lanes) -> None:
    processes = processes_of(doomed)
    processes[victim].kill()
    plan = make_plan(*[make_chunk(str(index), [1, 2, 3], blocks=(index,)) for index in range(8)])
    with pytest.raises(LaneError, match=f"lane {victim} has ended"):
        doomed.execute(plan)
    doomed.close()
    wait_until_gone(processes)


def test_signals_for_the_worker_do_not_end_its_lanes(lanes: Lanes) -> None:
    for process in processes_of(lanes):
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
    plan = make_plan(*[make_chunk(str(n), [1, 2, 3], blocks=(n,)) for n in range(8)])
    assert len(lanes.execute(plan).token_ids) == 8


def test_lanes_end_with_close_even_one_that_hangs(doomed: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.lanes._CLOSE_TIMEOUT_S", 0.1)
    processes = processes_of(doomed)
    assert len(processes) == 2
    processes[1].suspend()
    doomed.close()
    wait_until_gone(processes)
    doomed.close()


def test_lanes_end_with_the_process_that_started_them(config: EngineConfig) -> None:
    script = f"""
import time
from engine.config import EngineConfig
from engine.lanes import Lanes
from pathlib import Path
lanes = Lanes(EngineConfig(Path({str(config.model_dir)!r}), kv_cache_gib=0.001), count=2)
print(lanes._process.pid, flush=True)
time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=dict(os.environ))
    assert process.stdout is not None
    with process.stdout:
        first = psutil.Process(int(process.stdout.readline()))
    processes = [first, *first.children()]
    process.kill()
    process.wait()
    wait_until_gone(processes)


def wait_until_gone(processes: list[psutil.Process]) -> None:
    """A zombie is gone: who would reap it has ended too."""
    give_up = time.monotonic() + 20
    while any(map(is_there, processes)):
        assert time.monotonic() < give_up, processes
        time.sleep(0.01)


def is_there(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
