"""Slot use of static and of continuous batching, from the real scheduler and no model.

The classic exercise: 1000 requests that arrive together, output lengths uniform in 10 … 500, 16 slots. Static batching
takes 16 requests in arrival order and waits for the longest; the scheduler gives a slot on as soon as it is free.

    python -m benchmarks.slots

Prints one JSON object as its last line: slot use as fractions, steps, and the scheduler's time per step.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence

from engine.request import Request, Sampling, Stats
from engine.scheduler import Scheduler

NUM_REQUESTS = 1000
NUM_SLOTS = 16
MIN_LENGTH, MAX_LENGTH = 10, 500
BLOCK_SIZE = 16


def draw_lengths(seed: int = 0) -> list[int]:
    """The exercise's output lengths, in tokens."""
    rng = random.Random(seed)  # the same numbers as random.seed(seed) and the module's functions
    return [rng.randint(MIN_LENGTH, MAX_LENGTH) for _ in range(NUM_REQUESTS)]


def static_slot_use(lengths: Sequence[int], num_slots: int = NUM_SLOTS) -> float:
    """Share of slot-steps that make a token when each batch runs to its longest request."""
    batches = [lengths[start : start + num_slots] for start in range(0, len(lengths), num_slots)]
    return sum(lengths) / sum(num_slots * max(batch) for batch in batches)


def run_continuous(lengths: Sequence[int], num_slots: int = NUM_SLOTS) -> Stats:
    """The scheduler's counters after all requests are through, the drain at the end included."""
    scheduler = Scheduler(
        block_size=BLOCK_SIZE,
        num_blocks=num_slots * (MAX_LENGTH // BLOCK_SIZE + 2),
        context_length=2 * MAX_LENGTH,
        eos_ids=frozenset(),
        max_num_seqs=num_slots,
        max_num_batched_tokens=4 * num_slots,
    )
    for index, length in enumerate(lengths):
        scheduler.add(Request(id=str(index), prompt_ids=(0,), sampling=Sampling(max_tokens=length)))
    while plan := scheduler.plan():
        scheduler.commit(plan, [0] * len(plan.chunks))
    return scheduler.stats()


def main() -> None:
    lengths = draw_lengths()
    started = time.perf_counter()
    stats = run_continuous(lengths)
    elapsed_s = time.perf_counter() - started
    continuous = stats.slot_steps / (stats.steps * stats.slots)
    static = static_slot_use(lengths)
    print(f"static batching      {static:6.1%} of the slots make a token")
    print(f"continuous batching  {continuous:6.1%}, {stats.steps} steps")
    result = {
        "static": round(static, 4),
        "continuous": round(continuous, 4),
        "steps": stats.steps,
        "generated_tokens": stats.generated_tokens,
        "slots": stats.slots,
        "scheduler_us_per_step": round(elapsed_s / stats.steps * 1e6, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
