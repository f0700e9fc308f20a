"""The bare engine against transformers' static `generate`: same weights, same workload, same threads, in turn.

    python -m benchmarks.engine [--rounds N] [--threads N] [--batch-sizes 16,32] [--dtype float32] [--quick]

Static batching takes the requests in arrival order, or sorted by output length, which only a benchmark can know. Of the
batch sizes the better one counts. Every run is a process of its own; a round runs each contestant once, so that what
else the machine does hits all of them. The model is the one that EVERBATCH_MODEL names, prepared in EVERBATCH_HOME, in
bf16 where the CPU multiplies it, else in fp32.

Prints a line per run, then one JSON object as its last line: tokens/s (median over rounds) and our ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Before torch is imported: waiting threads must not spin, neither ours nor those that we are compared with.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import psutil
import torch
from transformers import AutoModelForCausalLM

from app.models import directory_of
from app.settings import get_settings
from benchmarks.workload import Item, describe, make_workload
from engine.builder import build
from engine.config import EngineConfig
from engine.models.prepare import WRITERS, prepare
from engine.request import Output
from engine.runner import choose_device, choose_dtype

BARS = {"static-sorted": 2.0, "static-arrival": 3.0}
"""What Everbatch's tokens/s are to be, at least, in multiples of each baseline's."""
QUICK_REQUESTS, QUICK_OUTPUT = 6, 8


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one contestant."""

    contestant: str
    output_tokens: int
    seconds: float
    tokens_per_s: float
    slot_use: float
    """Share of the places in the batches that made a token that was wanted."""
    tokens_per_cpu_s: float
    """Over the CPU-seconds of the run, of the process and of those that it started."""
    others_cores: float
    """Cores that other processes used meanwhile: above 0.05 the figures are not to be quoted."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What the requests took, once everything was warm."""

    seconds: float
    cpu_s: float
    slot_use: float


@dataclass(frozen=True, slots=True)
class Contest:
    """What all contestants share."""

    model_dir: Path
    items: list[Item]
    dtype: str
    threads: int


def native_dtype() -> str:
    """What the engine computes in on this machine, by torch's name."""
    return str(choose_dtype("auto", choose_device())).removeprefix("torch.")


def run_static(contest: Contest, batch_size: int, *, is_sorted: bool) -> Timing:
    """Padded `generate`, batch after batch; each runs to its longest request."""
    model = AutoModelForCausalLM.from_pretrained(
        contest.model_dir, dtype=getattr(torch, contest.dtype), local_files_only=True, attn_implementation="sdpa"
    ).eval()
    items = sorted(contest.items, key=lambda item: item.max_tokens) if is_sorted else contest.items
    batches = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
    _generate(model, [Item(item.prompt_ids[:32], 4) for item in batches[0]])  # warm
    started, cpu_s = time.perf_counter(), _cpu_s()
    for batch in batches:
        _generate(model, batch)
    seconds, cpu_s = time.perf_counter() - started, _cpu_s() - cpu_s
    places = sum(len(batch) * max(item.max_tokens for item in batch) for batch in batches)
    return Timing(seconds, cpu_s, sum(item.max_tokens for item in items) / places)


@torch.inference_mode()
def _generate(model: torch.nn.Module, batch: Sequence[Item]) -> None:
    """One batch, padded on the left; every row makes as many tokens as the longest asks for."""
    width, count = max(len(item.prompt_ids) for item in batch), max(item.max_tokens for item in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(batch):
        ids[row, width - len(item.prompt_ids) :] = torch.tensor(item.prompt_ids)
        mask[row, width - len(item.prompt_ids) :] = 1
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )
    assert out.shape[1] == width + count


def run_everbatch(contest: Contest) -> Timing:
    """Our engine with its default settings, from the first submit to the last finish."""
    engine = build(EngineConfig(contest.model_dir, dtype=contest.dtype))
    counts: dict[str, int] = {}
    left = threading.Semaphore(0)

    def collect(outputs: Sequence[Output]) -> None:
        for output in outputs:
            counts[output.request_id] = counts.get(output.request_id, 0) + len(output.token_ids)
            if output.finish:
                left.release()

    def run(items: Sequence[Item], prefix: str) -> None:
        for index, item in enumerate(items):
            engine.submit(item.request(f"{prefix}{index}"))
        for _ in items:
            while not left.acquire(timeout=5):
                if engine.failure:
                    raise RuntimeError(engine.failure)

    engine.start(collect)
    try:
        run(
            [Item(item.prompt_ids[31::-1], 4) for item in contest.items[:16]], "warm-"
        )  # backwards: no prefix to be found
        before, started, cpu_s = engine.stats(), time.perf_counter(), _cpu_s()
        run(contest.items, "")
        seconds, cpu_s, after = time.perf_counter() - started, _cpu_s() - cpu_s, engine.stats()
    finally:
        engine.close()
    assert all(counts[str(index)] == item.max_tokens for index, item in enumerate(contest.items))
    # The batch is as wide as there are requests that could be in it.
    places = (after.steps - before.steps) * min(after.slots, len(contest.items))
    return Timing(seconds, cpu_s, (after.slot_steps - before.slot_steps) / places)


def run_contestant(name: str, contest: Contest) -> Result:
    kind, _, batch_size = name.rpartition("-")
    runs: dict[str, Callable[[], Timing]] = {
        "": lambda: run_everbatch(contest),
        "static-sorted": lambda: run_static(contest, int(batch_size), is_sorted=True),
        "static-arrival": lambda: run_static(contest, int(batch_size), is_sorted=False),
    }
    torch.set_num_threads(contest.threads)
    busy, began, own_before = _busy_s(), time.perf_counter(), _cpu_s()
    timing = runs[kind]()
    own_cores = (_cpu_s() - own_before) / (time.perf_counter() - began)
    others = (_busy_s() - busy) / (time.perf_counter() - began) - own_cores
    tokens = sum(item.max_tokens for item in contest.items)
    return Result(
        contestant=name,
        output_tokens=tokens,
        seconds=round(timing.seconds, 2),
        tokens_per_s=round(tokens / timing.seconds, 1),
        slot_use=round(timing.slot_use, 3),
        tokens_per_cpu_s=round(tokens / timing.cpu_s, 1),
        others_cores=round(others, 2),
    )


def _cpu_s() -> float:
    """CPU-seconds of this process and of all that it started."""
    own = psutil.Process()
    return float(sum(sum(process.cpu_times()[:4]) for process in [own, *own.children(recursive=True)]))


def _busy_s() -> float:
    """Seconds that all cores of the machine together have worked."""
    times = psutil.cpu_times()
    return float(times.user + times.system)


def run_apart(name: str, options: argparse.Namespace) -> Result:
    """The contestant in a process of its own, with the same options."""
    command = [sys.executable, "-m", "benchmarks.engine", "--contestant", name, "--threads", str(options.threads)]
    command += ["--dtype", options.dtype] + (["--quick"] if options.quick else [])
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Result(**json.loads(run.stdout.splitlines()[-1]))


def summarize(results: Sequence[Result]) -> dict[str, object]:
    """Medians over rounds; for each baseline its better batch size, our ratio to it and whether the bar is met."""
    speeds: dict[str, list[float]] = {}
    for result in results:
        speeds.setdefault(result.contestant, []).append(result.tokens_per_s)
    medians = {name: round(statistics.median(values), 1) for name, values in speeds.items()}
    summary: dict[str, object] = {"tokens_per_s": medians, "others_cores": max(r.others_cores for r in results)}
    for kind, bar in BARS.items():
        best = max((name for name in medians if name.startswith(kind)), key=medians.__getitem__)
        ratio = medians["everbatch"] / medians[best]
        summary[kind] = {"best": best, "ratio": round(ratio, 2), "bar": bar, "met": ratio >= bar}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-sizes", default="16,32")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default=native_dtype())
    parser.add_argument("--quick", action="store_true", help="a smoke test: six requests of eight tokens")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()

    settings = get_settings()
    model_dir = directory_of(settings)
    if settings.model in WRITERS:
        prepare(settings.model, model_dir)
    items = make_workload()
    if options.quick:
        items = [Item(item.prompt_ids, QUICK_OUTPUT) for item in items[:QUICK_REQUESTS]]
    if options.contestant:
        contest = Contest(model_dir, items, options.dtype, options.threads)
        print(json.dumps(asdict(run_contestant(options.contestant, contest))))
        return

    contestants = ["everbatch", *(f"{kind}-{size}" for kind in BARS for size in options.batch_sizes.split(","))]
    print(json.dumps(describe(items)))
    results = []
    for _ in range(options.rounds):
        for name in contestants:
            results.append(run_apart(name, options))
            print(json.dumps(asdict(results[-1])), flush=True)
    setup = {"threads": options.threads, "dtype": options.dtype, "rounds": options.rounds, "torch": torch.__version__}
    print(json.dumps({"benchmark": "engine", **setup, **summarize(results)}))


if __name__ == "__main__":
    main()
