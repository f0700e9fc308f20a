"""Sampling features in pairs, and in any mixture: no preemption, resumption or neighbour changes a request's tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.limits import Limits, Preemption
from engine.policies import POLICIES
from engine.request import Finish, Request, Sampling, TokenLogprob
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.step import Progress

VOCABULARY = 300
PROMPT = tuple(range(40, 60))
FEATURES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 3.0, "seed": 5},
    "top_k": {"temperature": 50.0, "top_k": 4},
    "top_p": {"temperature": 50.0, "top_p": 0.3},
    "min_p": {"temperature": 50.0, "min_p": 0.9},
    "seed": {"temperature": 3.0, "seed": 2**63 - 1},
    "choice": {"temperature": 3.0, "choice": 2},
    "repetition_penalty": {"repetition_penalty": 0.2},  # no reward for what is new: this model never repeats itself
    "presence_penalty": {"presence_penalty": -8.0},
    "frequency_penalty": {"frequency_penalty": -5.0},
    "logit_bias": {"logit_bias": tuple((token_id, 7.0) for token_id in range(100, 140))},
    "allowed_ids": {"allowed_ids": tuple(range(2, VOCABULARY, 3))},
    "bad_words": {},  # of what comes without them
    "min_tokens": {"min_tokens": 7},
    "stop_ids": {},  # as bad_words
    "ignore_eos": {"ignore_eos": True},
    "top_logprobs": {"top_logprobs": 3},
}
MAX_TOKENS = 10


class Driver:
    """Runs requests over a model and a scheduler, a step at a time."""

    def __init__(self, directory: Path) -> None:
        self.runner = ModelRunner(EngineConfig(directory, dtype="float32", kv_cache_gib=0.002, kv_swap_gib=0.001))

    def run(
        self, requests: Sequence[Request], *, slots: int, preempt_at: int | None = None, preemption: Preemption
    ) -> dict[str, list[Progress]]:
        """What each request gained; at step `preempt_at` others come that take all the slots."""
        runner = self.runner
        scheduler = Scheduler(
            Limits(
                block_size=runner.block_size,
                num_blocks=runner.num_blocks,
                num_host_blocks=runner.num_host_blocks,
                context_length=runner.context_length,
                vocab_size=runner.vocab_size,
                eos_ids=runner.eos_ids,
                max_num_seqs=slots,
                max_num_batched_tokens=64,
                preemption=preemption,
                quantum_steps=0,
            ),
            policy=POLICIES["priority"](),
        )
        gained: dict[str, list[Progress]] = {request.id: [] for request in requests}
        for request in requests:
            if end := scheduler.add(replace(request, rank=1)):
                gained[request.id].append(end)
        for number in itertools.count():
            if number == preempt_at:
                for slot in range(slots):
                    scheduler.add(Request(f"intruder {slot}", (slot + 1,), Sampling(2, ignore_eos=True)))
            plan = scheduler.plan()
            if plan is None:
                assert preempt_at is None or scheduler.stats().preemptions
                return gained
            for progress in scheduler.commit(plan, runner.execute(plan)):
                gained.setdefault(progress.request_id, []).append(progress)
            scheduler.check()
        raise AssertionError("unreachable")

    def alone(self, requests: Sequence[Request]) -> dict[str, list[Progress]]:
        return self.run(requests, slots=1, preemption=Preemption.RECOMPUTE)


@pytest.fixture(scope="module")
def driver(llama_dir: Path) -> Driver:
    return Driver(llama_dir)


def tokens_of(gained: Sequence[Progress]) -> list[int]:
    return [token_id for progress in gained for token_id in progress.token_ids]


def logprobs_of(gained: Sequence[Progress]) -> list[TokenLogprob]:
    return [logprob for progress in gained for logprob in progress.logprobs]


@pytest.fixture(scope="module")
def features(driver: Driver) -> dict[str, dict[str, Any]]:
    """FEATURES, with words and ends that the model would say."""
    plain = Sampling(MAX_TOKENS, temperature=0.0, ignore_eos=True)
    said = tokens_of(driver.alone([Request("plain", PROMPT, plain)])["plain"])
    words = {"bad_words": ((said[0],), tuple(said[1:3]), (PROMPT[-1], said[1]))}
    return FEATURES | {"bad_words": words, "stop_ids": {"stop_ids": (said[4],)}}


def request_of(name: str, *features: dict[str, Any]) -> Request:
    fields = {"temperature": 0.0}
    for feature in features:
        fields |= feature
    return Request(name, PROMPT, Sampling(MAX_TOKENS, **fields))


def test_each_feature_shows(driver: Driver, features: dict[str, dict[str, Any]]) -> None:
    """By itself, or beside one that lets it show: else the pairs below would prove nothing of it."""
    beside: dict[str, dict[str, Any]] = {
        "seed": {"temperature": 3.0},
        "choice": {"temperature": 3.0},
        "top_k": {"temperature": 50.0},
        "top_p": {"temperature": 50.0},
        "min_p": {"temperature": 50.0},
        "min_tokens": {"logit_bias": ((2, 100.0),)},
        "ignore_eos": {"logit_bias": ((2, 100.0),)},
    }
    requests = []
    for name, feature in features.items():
        requests += [
            request_of(f"{name} on", beside.get(name, {}), feature),
            request_of(f"{name} off", beside.get(name, {})),
        ]
    found = driver.alone(requests)
    for name in features:
        on, off = found[f"{name} on"], found[f"{name} off"]
        assert (tokens_of(on), logprobs_of(on)) != (tokens_of(off), logprobs_of(off)), name
    assert len(tokens_of(found["min_tokens on"])) == 8  # 7, and the end that is by far the likeliest
    assert len(tokens_of(found["stop_ids on"])) == 5
    assert found["stop_ids on"][-1].finish is Finish.STOP


PAIRS = list(itertools.combinations(FEATURES, 2))


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
@pytest.mark.parametrize(
    "pairs",
    [
        random.Random(1).sample(PAIRS, 5),
        pytest.param(PAIRS, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
    ids=len,
)
def test_no_pair_of_features_is_changed_by_preemption_or_resumption(
    pairs: list[tuple[str, str]], preemption: Preemption, driver: Driver, features: dict[str, dict[str, Any]]
) -> None:
    requests = [request_of(" ".join(pair), *(features[name] for name in pair)) for pair in pairs]
    whole = driver.alone(requests)
    together = driver.run(requests, slots=6, preempt_at=4, preemption=preemption)
    for request in requests:
        tokens, name = tokens_of(whole[request.id]), request.id
        compare(f"{name}, with others", together[name], whole[name])
        for is_preempted, cut in itertools.product([False, True], {1, len(tokens) // 2} - {0, len(tokens)}):
            again = driver.run(
                [replace(request, resumed_ids=tuple(tokens[:cut]))],
                slots=1,
                preempt_at=2 if is_preempted and len(tokens) - cut > 3 else None,
                preemption=preemption,
            )
            compare(f"{name}, resumed after {cut}, preempted: {is_preempted}", again[name], whole[name][cut:])
        if len(tokens) > 3:
            again = driver.run([request], slots=1, preempt_at=2, preemption=preemption)
            compare(f"{name}, preempted", again[name], whole[name])


def compare(name: str, gained: Sequence[Progress], expected: Sequence[Progress]) -> None:
    """Tokens and ends are the same; log-probabilities are sums in another order."""
    assert tokens_of(gained) == tokens_of(expected), name
    assert gained[-1].finish == expected[-1].finish, name
    assert len(logprobs_of(gained)) == len(logprobs_of(expected)), name
    for one, other in zip(logprobs_of(gained), logprobs_of(expected), strict=True):
        assert one.token_id == other.token_id, name
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4), name
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4), name


IDS = st.integers(0, VOCABULARY - 1) | st.sampled_from([2, 5]) | st.integers(-2, 2**40)
NUMBERS = st.floats() | st.floats(-2, 2) | st.sampled_from([0.0, 1.0, 5e-324, 1e6, -1e6, 1e-6])
SAMPLINGS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 5) | st.integers(-1, 5)},
    optional={
        "temperature": st.floats(0, 2) | NUMBERS,
        "top_k": st.integers(0, 400) | st.integers(),
        "top_p": st.floats(0, 1) | NUMBERS,
        "min_p": st.floats(0, 1) | NUMBERS,
        "seed": st.integers(0, 2**63 - 1) | st.integers(),
        "choice": st.integers(0, 5) | st.integers(),
        "ignore_eos": st.booleans(),
        "repetition_penalty": st.floats(0.5, 2) | NUMBERS,
        "presence_penalty": NUMBERS,
        "frequency_penalty": NUMBERS,
        "logit_bias": st.lists(st.tuples(IDS, NUMBERS), max_size=4).map(tuple),
        "allowed_ids": st.none() | st.lists(IDS, max_size=4).map(tuple),
        "bad_words": st.lists(st.lists(IDS, max_size=3).map(tuple), max_size=3).map(tuple),
        "min_tokens": st.integers(-1, 10),
        "stop_ids": st.lists(IDS, max_size=3).map(tuple),
        "top_logprobs": st.none() | st.integers(-1, 25),
    },
).map(lambda fields: Sampling(**fields))
REQUESTS = st.builds(
    Request,
    id=st.uuids().map(str),
    prompt_ids=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6).map(tuple)
    | st.lists(IDS, max_size=3).map(tuple),
    sampling=SAMPLINGS,
    resumed_ids=st.lists(IDS, max_size=2).map(tuple),
)
NEIGHBOURS = [
    Request("greedy", PROMPT, Sampling(6, temperature=0.0, ignore_eos=True)),
    Request("drawn", PROMPT[3:], Sampling(6, temperature=9.0, top_p=0.9, seed=4, frequency_penalty=1.0, min_tokens=6)),
]


@pytest.fixture(scope="module")
def neighbours_alone(driver: Driver) -> dict[str, list[Progress]]:
    return driver.alone(NEIGHBOURS)


def check_mixture(mixture: list[Request], driver: Driver, neighbours_alone: dict[str, list[Progress]]) -> None:
    """All end, each with a result or a sentence, and who has nothing to do with it has its own tokens."""
    found = driver.run([*NEIGHBOURS, *mixture], slots=6, preemption=Preemption.AUTO)
    for request in mixture:
        end = found[request.id][-1]
        assert end.finish in {Finish.STOP, Finish.LENGTH, Finish.ERROR}
        assert (end.finish is Finish.ERROR) == bool(end.error)
        assert all(0 <= token_id < VOCABULARY for token_id in tokens_of(found[request.id]))
    for neighbour in NEIGHBOURS:
        compare(neighbour.id, found[neighbour.id], neighbours_alone[neighbour.id])


MIXTURES = st.lists(REQUESTS, min_size=10, max_size=10, unique_by=lambda request: request.id)
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=10, deadline=None, suppress_health_check=QUIET)
@given(mixture=MIXTURES)
def test_any_parameters_end_and_hurt_no_neighbour(
    mixture: list[Request], driver: Driver, neighbours_alone: dict[str, list[Progress]]
) -> None:
    check_mixture(mixture, driver, neighbours_alone)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=500, deadline=None, suppress_health_check=QUIET)
@given(mixture=MIXTURES)
def test_five_thousand_parameters_end_and_hurt_no_neighbour(
    mixture: list[Request], driver: Driver, neighbours_alone: dict[str, list[Progress]]
) -> None:
    check_mixture(mixture, driver, neighbours_alone)
