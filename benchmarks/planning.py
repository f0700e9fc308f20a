"""What planning costs: milliseconds of one core for plan() and commit(), by the size of the running batch.

    python -m benchmarks.planning [--quick]

Steps of the real scheduler with its default policy over full batches, with 4000 requests of 50 tenants in line. Outputs
have 200 to 600 tokens, so that in each step some leave and others join; the sampled tokens are given, nothing else is
left out. plan() decides and makes the arrays that a step needs: block tables, positions, lengths.

Prints one JSON object as its last line; sizes interleave, so that all of them see the same machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from engine.garbage import collect_rarely
from engine.limits import Limits
from engine.request import Request, Sampling, Stats
from engine.scheduler import Scheduler
from engine.step import Sampled

SIZES = (64, 256, 1024, 2048)
WAITING = 4000
TENANTS = 50
ROUNDS = 40
STEPS = 10
"""Steps in a row of one size, before it is the next one's turn."""
STEP_MS = 25.0
"""What a step is said to take."""
GOAL_MS = 1.0
"""What plan() may take in the median for 1024 sequences."""


class Load:
    """A scheduler whose batch is full and whose line is long, for ever."""

    def __init__(self, size: int) -> None:
        self._rng = random.Random(size)
        self._number = 0
        self._now = 0.0
        self._scheduler = Scheduler(
            Limits(
                block_size=32,
                num_blocks=size * 32,
                context_length=4096,
                eos_ids=frozenset({0}),
                max_num_seqs=size,
                max_num_batched_tokens=max(2048, 2 * size),
                step_budget_ms=1e6,  # sized in time, and never short of it
            )
        )
        self.plan_ms: list[float] = []
        self.commit_ms: list[float] = []
        while self.stats().running < size:
            self.step()
        self.plan_ms.clear()
        self.commit_ms.clear()

    def step(self) -> None:
        while self.stats().waiting < WAITING:
            self._scheduler.add(self._make_request(), self._now)
        began = time.perf_counter()
        plan = self._scheduler.plan(self._now)
        planned = time.perf_counter()
        assert plan is not None
        sampled = Sampled([1] * plan.num_sampling)
        computed = time.perf_counter()
        self._scheduler.commit(plan, sampled, elapsed_ms=STEP_MS)
        self._now += STEP_MS / 1000
        self.plan_ms.append(1000 * (planned - began))
        self.commit_ms.append(1000 * (time.perf_counter() - computed))

    def stats(self) -> Stats:
        return self._scheduler.stats()

    def _make_request(self) -> Request:
        self._number += 1
        tenant = self._rng.randrange(TENANTS)
        return Request(
            str(self._number),
            tuple(self._rng.randrange(1, 30_000) for _ in range(self._rng.randint(8, 64))),
            Sampling(self._rng.randint(200, 600)),
            tenant=str(tenant),
            rank=tenant % 3,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test: two rounds of the two small sizes")
    options = parser.parse_args()

    loads = {size: Load(size) for size in (SIZES[:2] if options.quick else SIZES)}
    collect_rarely()  # as a worker does
    for _ in range(2 if options.quick else ROUNDS):
        for load in loads.values():
            for _ in range(STEPS):
                load.step()
    print(f"{'running':>8}{'plan p50':>12}{'p99':>8}{'commit p50':>12}{'p99':>8}   ms")
    sizes = {size: _figures(load) for size, load in loads.items()}
    for size, figures in sizes.items():
        print("{:>8}{:>12}{:>8}{:>12}{:>8}".format(size, *figures.values()))
    result = {"benchmark": "planning", "steps": len(loads[SIZES[0]].plan_ms), "running": sizes, "goal_ms": GOAL_MS}
    if not options.quick:
        result["met"] = sizes[1024]["plan_p50_ms"] <= GOAL_MS
    print(json.dumps(result))


def _figures(load: Load) -> dict[str, float]:
    """Medians and 99th percentiles."""
    return {
        f"{name}_{share}_ms": round(statistics.quantiles(values, n=100)[index], 3)
        for name, values in (("plan", load.plan_ms), ("commit", load.commit_ms))
        for share, index in (("p50", 49), ("p99", 98))
    }


if __name__ == "__main__":
    main()
