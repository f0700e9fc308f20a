"""What the service costs per token, in CPU-microseconds of all its processes, less what the bare engine takes.

So many jobs run at once, a step every 20 ms; nobody follows them, but every token is committed and announced. Measured
while all of them run; the idle service's own cost is in it. The bare engine runs the same steps in this process.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Mapping, Sequence

from app.cli.demo.service import Service
from app.tiers import Tier
from benchmarks.service.noop import put_in_line
from benchmarks.service.report import Bar, Quantity, over_rounds
from benchmarks.service.stack import ask, cpu_s, echo_service, forget_jobs, prompt, wait_for
from engine.builder import build
from engine.config import EngineConfig
from engine.request import Output, Request, Sampling

RUNNING = (1, 16, 64, 256)
STEP_MS = 20.0
TOKENS = 1500
"""Of each job: more than are computed while it is looked at, and the KV cache holds those of all."""
BARS = {"us_per_token_at_64": Bar(at_most=100)}


def measure(options: argparse.Namespace) -> Mapping[str, Quantity]:
    seconds = 0.5 if options.quick else 2.0
    with echo_service(slots=max(RUNNING), step_ms=STEP_MS) as running:
        bare = {number: _bare_us(running, number, seconds) for number in RUNNING}
        return over_rounds(
            options.rounds,
            lambda: {
                f"us_per_token_at_{number}": _service_us(running, number, seconds) - bare[number] for number in RUNNING
            },
            BARS,
        )


def _service_us(running: Service, number: int, seconds: float) -> float:
    """CPU-microseconds per token of the whole service, its engine included."""
    forget_jobs(running)
    put_in_line(running, Tier.PAID, number, max_tokens=TOKENS)
    wait_for(running, "(select count(distinct job_id) from events where kind = 'tokens') = :number", number=number)
    tokens, before = _tokens(running), cpu_s(running)
    time.sleep(seconds)
    spent = cpu_s(running).total() - before.total()
    tokens = _tokens(running) - tokens
    return 1e6 * spent / tokens


def _tokens(running: Service) -> int:
    return int(ask(running, "select sum(cardinality(token_ids)) as tokens from events").tokens)


def _bare_us(running: Service, number: int, seconds: float) -> float:
    """CPU-microseconds per token of the engine alone."""
    engine = build(
        EngineConfig(
            running.model.directory, max_num_seqs=max(RUNNING), max_num_batched_tokens=256, echo_step_ms=STEP_MS
        )
    )
    count = 0
    began = threading.Event()

    def collect(outputs: Sequence[Output]) -> None:
        nonlocal count
        count += sum(len(output.token_ids) for output in outputs)
        if count >= 2 * number:
            began.set()

    engine.start(collect)
    try:
        for place in range(number):
            engine.submit(Request(str(place), tuple(prompt(16)), Sampling(TOKENS, seed=1, ignore_eos=True)))
        assert began.wait(30)
        tokens, before = count, time.process_time()
        time.sleep(seconds)
        return 1e6 * (time.process_time() - before) / (count - tokens)
    finally:
        engine.close()
