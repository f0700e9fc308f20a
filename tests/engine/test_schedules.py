"""On the real model, no schedule shows: tokens and their log-probabilities are those of a request alone."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.limits import Limits, Preemption, Prefill
from engine.policies import POLICIES
from engine.request import Request, Sampling
from engine.runner import ModelRunner
from engine.scheduler import Scheduler

TOLERANCE = 1e-4
"""Of log-probabilities in fp32; two tokens closer than this are a tie."""
TEXT = (
    "The ferry left at seven, and the baker who always missed it was on board for once, with two loaves under his arm "
    "and flour on his boots. The tide was low, the harbour smelled of tar, and a dog ran along the pier as far as it "
    "could. On the other side somebody had painted the waiting room green."
)
Line = tuple[list[int], list[float]]
"""A request's tokens and their log-probabilities."""


class Recorder:
    """A model's runner that keeps the log-probability of each token that it samples."""

    def __init__(self, directory: Path) -> None:
        config = EngineConfig(directory, dtype="float32", kv_cache_gib=0.02, kv_swap_gib=0.02)
        self.runner = ModelRunner(config)
        self._rows: torch.Tensor | None = None
        logits_of = self.runner._decoder.logits
        self.runner._decoder.logits = lambda *asked: self._keep(logits_of(*asked))  # type: ignore[method-assign]

    def _keep(self, logits: torch.Tensor) -> torch.Tensor:
        self._rows = logits.float().log_softmax(-1)
        return logits

    def run(
        self, requests: Sequence[Request], *, seed: int | None = None, **limits: Any
    ) -> tuple[dict[str, Line], int]:
        """The lines of the requests and how often one was preempted; with a seed they arrive at random steps."""
        runner, rng = self.runner, random.Random(seed)
        plain: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 32}
        scheduler = Scheduler(
            Limits(
                block_size=runner.block_size,
                num_blocks=runner.num_blocks,
                num_host_blocks=runner.num_host_blocks,
                context_length=runner.context_length,
                eos_ids=runner.eos_ids,
                quantum_steps=0,
                swap_block_ms=0.0,
                **plain | limits,
            ),
            policy=POLICIES["priority" if seed is None else rng.choice(["priority", "tiered"])](),
        )
        coming, lines = deque(requests), defaultdict[str, Line](lambda: ([], []))
        for number in itertools.count():
            while coming and (seed is None or not number or rng.random() < 0.4):
                scheduler.add(coming.popleft(), float(number))
            plan = scheduler.plan(float(number))
            if plan is None:
                if not coming:
                    return dict(lines), scheduler.stats().preemptions
                continue
            sampled = runner.execute(plan)
            rows = self._rows
            for index, progress in enumerate(scheduler.commit(plan, sampled)):
                assert rows is not None
                tokens, logprobs = lines[progress.request_id]
                tokens += progress.token_ids
                logprobs.append(float(rows[index, progress.token_ids[0]]))
            scheduler.check()
        raise AssertionError("unreachable")


@pytest.fixture(scope="module")
def recorder(smollm2_dir: Path) -> Iterator[Recorder]:
    recorder = Recorder(smollm2_dir)
    yield recorder
    recorder.runner.close()


@pytest.fixture(scope="module")
def requests(smollm2_dir: Path) -> list[Request]:
    """Beginnings of one text, so that there are blocks to share; greedy and drawn; three tiers, two tenants."""
    ids = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")).encode(TEXT).ids
    rng = random.Random(7)
    return [
        Request(
            str(number),
            tuple(ids[: rng.choice([64, 40, 33, 20])]),
            Sampling(rng.randint(6, 14), temperature=float(number % 2), seed=number, ignore_eos=True),
            rank=2 - number % 3,
            tenant="ab"[number % 2],
        )
        for number in range(7)
    ]


@pytest.fixture(scope="module")
def alone(recorder: Recorder, requests: list[Request]) -> dict[str, Line]:
    """Each request by itself, its prompt in one piece, nothing cached."""
    lines: dict[str, Line] = {}
    for request in requests:
        lines |= recorder.run([replace(request, rank=0)], max_num_batched_tokens=256, prefix_cache=False)[0]
    return lines


@pytest.mark.parametrize("preemption", Preemption)
@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 40), marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=len
)
def test_no_schedule_changes_tokens_or_their_probabilities(
    preemption: Preemption,
    seeds: range,
    recorder: Recorder,
    requests: list[Request],
    alone: dict[str, Line],
    capsys: pytest.CaptureFixture[str],
) -> None:
    preemptions = 0
    for seed in seeds:
        prefill = list(Prefill)[seed % 3]
        lines, count = recorder.run(requests, seed=seed, preemption=preemption, prefill=prefill)
        preemptions += count
        for request in requests:
            compare(f"seed {seed}, request {request.id}", lines[request.id], alone[request.id], capsys)
    assert preemptions, "the test needs preemptions"


def compare(name: str, line: Line, expected: Line, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to a tie, which is reported: behind it the texts are different ones."""
    for position, (token, logprob, own, own_logprob) in enumerate(zip(*line, *expected, strict=True)):
        assert abs(logprob - own_logprob) <= TOLERANCE, f"{name}, token {position}"
        if token != own:
            with capsys.disabled():
                print(f"{name}, token {position}: {token} and {own} tie")  # noqa: T201
            return
