"""Slot use of static and of continuous batching, from the real scheduler and no model.

The classic exercise: 1000 requests that arrive together, output lengths uniform in 10 … 500, 16 slots. Static batching
takes 16 requests in arrival order and waits for the longest; the scheduler gives a slot on as soon as it is free. What
is lost then is lost at the end, and less of it where the longest went first: by lengths that are known, or predicted
with a lognormal error.

    python -m benchmarks.slots [--seeds N]

Prints one JSON object as its last line: slot use as fractions, of the first seed and in the mean of N, the drain at the
end included; steps; and the scheduler's time per step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence

from engine.limits import Limits
from engine.policies.fcfs import FirstComeFirstServed
from engine.policies.ljf import LongestFirst
from engine.request import Request, Sampling, Stats
from engine.scheduler import Scheduler
from engine.step import Sampled

NUM_REQUESTS = 1000
NUM_SLOTS = 16
MIN_LENGTH, MAX_LENGTH = 10, 500
BLOCK_SIZE = 16
SIGMA = 0.5
"""Of the predictor's error."""


def draw_lengths(seed: int = 0) -> list[int]:
    """The exercise's output lengths, in tokens."""
    rng = random.Random(seed)  # the same numbers as random.seed(seed) and the module's functions
    return [rng.randint(MIN_LENGTH, MAX_LENGTH) for _ in range(NUM_REQUESTS)]


def static_slot_use(lengths: Sequence[int], num_slots: int = NUM_SLOTS) -> float:
    """Share of slot-steps that make a token when each batch runs to its longest request."""
    batches = [lengths[start : start + num_slots] for start in range(0, len(lengths), num_slots)]
    return sum(lengths) / sum(num_slots * max(batch) for batch in batches)


def predict(lengths: Sequence[int], sigma: float, seed: int) -> list[int]:
    """The lengths with a lognormal error: σ of its logarithm. With 0.5, ranks correlate by 0.8."""
    rng = random.Random(seed)
    return [max(1, round(length * rng.lognormvariate(0.0, sigma))) for length in lengths]


def slot_use(stats: Stats) -> float:
    return stats.slot_steps / (stats.steps * stats.slots)


def run_continuous(
    lengths: Sequence[int], num_slots: int = NUM_SLOTS, *, predicted: Sequence[int] | None = None
) -> Stats:
    """The scheduler's counters after all requests are through, the drain at the end included.

    predicted  lengths by which the longest goes first; None: first come, first served
    """
    limits = Limits(
        block_size=BLOCK_SIZE,
        num_blocks=num_slots * (MAX_LENGTH // BLOCK_SIZE + 2),
        context_length=2 * MAX_LENGTH,
        eos_ids=frozenset(),
        max_num_seqs=num_slots,
        max_num_batched_tokens=4 * num_slots,
    )
    scheduler = Scheduler(limits, policy=LongestFirst() if predicted else FirstComeFirstServed())
    for index, (length, expected) in enumerate(zip(lengths, predicted or lengths, strict=True)):
        request = Request(str(index), prompt_ids=(0,), sampling=Sampling(max_tokens=length), expected_tokens=expected)
        scheduler.add(request)
    while plan := scheduler.plan():
        scheduler.commit(plan, Sampled([0] * len(plan.chunks)))
    return scheduler.stats()


def mean_slot_use(seeds: Sequence[int], *, sigma: float | None) -> float:
    """The longest first, by prediction; None: first come, first served."""
    uses = []
    for seed in seeds:
        lengths = draw_lengths(seed)
        predicted = None if sigma is None else predict(lengths, sigma, seed)
        uses.append(slot_use(run_continuous(lengths, predicted=predicted)))
    return statistics.mean(uses)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slots", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()

    lengths = draw_lengths()
    started = time.perf_counter()
    stats = run_continuous(lengths)
    elapsed_s = time.perf_counter() - started
    continuous = slot_use(stats)
    static = static_slot_use(lengths)
    print(f"static batching      {static:6.1%} of the slots make a token")
    print(f"continuous batching  {continuous:6.1%}, {stats.steps} steps")
    seeds = range(options.seeds)
    means = {
        "arrival_order": round(mean_slot_use(seeds, sigma=None), 4),
        "longest_first_predicted": round(mean_slot_use(seeds, sigma=SIGMA), 4),
        "longest_first_known": round(mean_slot_use(seeds, sigma=0.0), 4),
    }
    for name, use in means.items():
        print(f"{name:24} {use:7.2%}, mean of {len(seeds)} seeds")
    result = {
        "static": round(static, 4),
        "continuous": round(continuous, 4),
        "steps": stats.steps,
        "generated_tokens": stats.generated_tokens,
        "slots": stats.slots,
        "seeds": len(seeds),
        "means": means,
        "scheduler_us_per_step": round(elapsed_s / stats.steps * 1e6, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
