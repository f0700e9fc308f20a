"""The simulator: arithmetic, determinism, and where requests are computed."""

from __future__ import annotations

import random

import pytest

from engine.cost import Coefficients
from engine.limits import Limits
from engine.policies.fcfs import FirstComeFirstServed
from engine.report import Report, jain, percentile
from engine.request import Finish, Request, Sampling
from engine.scheduler import Scheduler
from engine.sim import Arrival, Placement, Simulation

COST = Coefficients(step=10.0, row=1.0, prefill_token=0.5, prefill_pair=0.0, kv_position=0.0)


def make_scheduler() -> Scheduler:
    shape = {"block_size": 16, "num_blocks": 256, "context_length": 512, "max_num_seqs": 4}
    return Scheduler(Limits(eos_ids=frozenset(), max_num_batched_tokens=64, **shape), policy=FirstComeFirstServed())


def make_arrivals(count: int, seed: int = 0) -> list[Arrival]:
    rng = random.Random(seed)
    return [
        Arrival(
            rng.uniform(0, 2),
            Request(str(n), tuple(rng.randrange(999) for _ in range(rng.randint(4, 60))), Sampling(rng.randint(1, 40))),
        )
        for n in range(count)
    ]


def run(speeds: tuple[float, ...], placement: Placement, seed: int = 0) -> Report:
    return Simulation(make_scheduler, COST, speeds=speeds, placement=placement, noise=0.1).run(make_arrivals(80, seed))


def test_one_request_takes_what_its_steps_cost() -> None:
    request = Request("a", tuple(range(20)), Sampling(3))
    trace = Simulation(make_scheduler, COST).run([Arrival(1.0, request)]).traces["a"]
    assert trace.ttft_s == pytest.approx((10 + 20 * 0.5) / 1000)
    assert trace.finished_s == pytest.approx(1 + (20 + 2 * 11) / 1000)
    assert trace.longest_gap_s == pytest.approx(0.011)


def test_what_is_refused_or_too_late_ends_as_such() -> None:
    long = Request("long", tuple(range(600)), Sampling(3))
    late = Request("late", tuple(range(20)), Sampling(40), deadline=1.1)
    traces = Simulation(make_scheduler, COST).run([Arrival(1.0, long), Arrival(1.0, late)]).traces
    assert (traces["long"].finish, traces["long"].num_tokens) == (Finish.ERROR, 0)
    assert traces["late"].finish is Finish.EXPIRED and 0 < traces["late"].num_tokens < 40
    assert traces["late"].finished_s == pytest.approx(1.1, abs=0.02)


@pytest.mark.parametrize("placement", Placement)
def test_everything_ends_whole_and_the_same_again(placement: Placement) -> None:
    report, again = (run((1.0, 2.0), placement) for _ in range(2))
    assert report.traces == again.traces
    assert {trace.worker for trace in report.traces.values()} == {0, 1}
    for trace in report.traces.values():
        assert trace.num_tokens == trace.request.sampling.max_tokens
        assert trace.finished_s is not None


def test_workers_that_pull_are_done_before_workers_that_are_dealt_to() -> None:
    pulled, dealt = (
        sum(run((1.0, 4.0), placement, seed).makespan_s for seed in range(5))
        for placement in (Placement.PULL, Placement.ROUND_ROBIN)
    )
    assert pulled < 0.8 * dealt


def test_measures_of_many() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == 2
    assert percentile([1, 2, 3, 4], 0.99) == 4
    assert jain([1, 1, 1, 1]) == 1
    assert jain([4, 0, 0, 0]) == 0.25
