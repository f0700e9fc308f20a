"""What sampling costs: milliseconds for 64 rows, as a share of the decode step of the real model that they end.

    python -m benchmarks.sampling [--rounds N] [--quick]

One thread, as a lane of the engine has; 64 sequences decode behind 64 tokens of the README, in bf16 where the CPU
multiplies it, else in fp32; penalties are over 256 different tokens. The step is greedy, its own sampling included;
each kind of sampling is then timed on the logits that it made.
Kinds and steps take turns, so that all of them see the same machine; figures are medians. The model is the one that
EVERBATCH_MODEL names, prepared in EVERBATCH_HOME.

Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import psutil
import torch
from tokenizers import Tokenizer

from app.models import directory_of
from app.settings import get_settings
from engine.config import EngineConfig
from engine.models.prepare import WRITERS, prepare
from engine.request import Sampling
from engine.runner import ModelRunner
from engine.sampling import sample
from engine.step import Chunk, Past, StepPlan, pack

ROWS = 64
LENGTH = 64
"""Tokens that each sequence has."""
DIFFERENT = 256
"""Tokens that penalties are over."""
GREEDY = Sampling(1000, temperature=0.0)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "masks": {"temperature": 0.8, "top_p": 0.9, "min_tokens": 500, "bad_words": ((5, 6),), "logit_bias": ((7, -5.0),)},
    "logprobs": {"top_logprobs": 5},
}
GOALS = {"greedy": 5.0}
"""Per cent of the step."""
OTHER_GOAL = 20.0


def make_chunks(ids: Sequence[int], block_size: int) -> list[Chunk]:
    """ROWS pieces of a text, of LENGTH tokens each."""
    width = -(-(LENGTH + 1) // block_size)
    return [
        Chunk(str(row), tuple(ids[start : start + LENGTH]), 0, tuple(range(row * width, (row + 1) * width)), GREEDY)
        for row, start in enumerate(np.linspace(0, len(ids) - LENGTH, ROWS, dtype=int).tolist())
    ]


def prefill(runner: ModelRunner, chunks: Sequence[Chunk]) -> StepPlan:
    """Compute the pieces. Returns the step in which all decode."""
    decodes = []
    for chunk in chunks:
        token_ids = runner.execute(pack(1, [chunk], block_size=runner.block_size)).token_ids
        decodes.append(replace(chunk, token_ids=tuple(token_ids), start=LENGTH))
    return pack(2, decodes, block_size=runner.block_size)


def make_past(vocab_size: int, rng: random.Random) -> Past:
    ids = np.array(rng.sample(range(vocab_size), DIFFERENT), dtype=np.int32)
    return Past(DIFFERENT // 2, (5,), ids, np.arange(DIFFERENT, dtype=np.int32) % 2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a smoke test: a single round")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds

    torch.set_num_threads(1)
    settings = get_settings()
    model_dir = directory_of(settings)
    if settings.model in WRITERS:
        prepare(settings.model, model_dir)
    runner = ModelRunner(EngineConfig(model_dir, max_num_seqs=ROWS))
    rng = random.Random(1)
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text).ids
    plan = prefill(runner, make_chunks(ids, runner.block_size))
    pasts = {row: make_past(runner.vocab_size, rng) for row in range(ROWS)}
    samplings = {kind: [replace(GREEDY, seed=row, **fields) for row in range(ROWS)] for kind, fields in KINDS.items()}
    step_ms: list[float] = []
    kind_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    began, cpu_s, busy_s = time.perf_counter(), _cpu_s(), _busy_s()
    for number in range(rounds + 1):
        started = time.perf_counter()
        logits = runner.logits(plan)
        forward_ms = 1000 * (time.perf_counter() - started)
        for kind, rows in samplings.items():
            started = time.perf_counter()
            with torch.inference_mode():
                sample(logits, rows, [LENGTH + 1] * ROWS, pasts=pasts, eos_ids=runner.eos_ids)
            kind_ms[kind].append(1000 * (time.perf_counter() - started))
        step_ms.append(forward_ms + kind_ms["greedy"][-1])
        if not number and not options.quick:  # everything was cold
            step_ms.clear()
            for times in kind_ms.values():
                times.clear()
    others = (_busy_s() - busy_s - _cpu_s() + cpu_s) / (time.perf_counter() - began)
    step = statistics.median(step_ms)
    kinds = {
        kind: _figures(statistics.median(times), step, GOALS.get(kind, OTHER_GOAL)) for kind, times in kind_ms.items()
    }
    for kind, figures in kinds.items():
        print(f"{kind:>12} {figures['ms']:>8} ms {figures['percent']:>6} % of {step:.0f} ms")
    print(
        json.dumps(
            {
                "benchmark": "sampling",
                "rows": ROWS,
                "dtype": str(logits.dtype).removeprefix("torch."),
                "rounds": rounds,
                "step_ms": round(step, 1),
                "kinds": kinds,
                "others_cores": round(others, 2),
            }
        )
    )


def _figures(ms: float, step_ms: float, goal: float) -> dict[str, Any]:
    percent = round(100 * ms / step_ms, 1)
    return {"ms": round(ms, 2), "percent": percent, "goal": goal, "met": percent <= goal}


def _cpu_s() -> float:
    """CPU-seconds of this process."""
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def _busy_s() -> float:
    """Seconds that all cores of the machine together have worked."""
    times = psutil.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
