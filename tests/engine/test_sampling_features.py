"""Sampling features in pairs, and in any mixture: whatever happens to a request, its answer is the one it has alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.limits import Preemption
from engine.request import Finish, Request, Sampling
from tests.engine.answers import EOS_IDS, VOCABULARY, Answer, Driver, compare, text_at_once, write_tokenizer
from tests.guiding import regex

PROMPT = tuple(range(40, 60))
END = {"logit_bias": ((EOS_IDS[0], 100.0),)}
"""The model would end its text at once."""
FEATURES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 3.0, "seed": 5},
    "top_k": {"temperature": 50.0, "top_k": 4},
    "top_p": {"temperature": 50.0, "top_p": 0.3},
    "min_p": {"temperature": 50.0, "min_p": 0.9},
    "seed": {"temperature": 3.0, "seed": 2**63 - 1},
    "n": {"temperature": 3.0, "choice": 2},
    "repetition_penalty": {"repetition_penalty": 0.2},  # no reward for what is new: this model never repeats itself
    "presence_penalty": {"presence_penalty": -8.0},
    "frequency_penalty": {"frequency_penalty": -5.0},
    "logit_bias": {"logit_bias": tuple((token_id, 7.0) for token_id in range(100, 140))},
    "allowed_ids": {"allowed_ids": tuple(range(2, VOCABULARY, 3))},
    "bad_words": {},  # of what comes without them
    "min_tokens": {"min_tokens": 7, **END},
    "ignore_eos": {"ignore_eos": True, "logit_bias": ((EOS_IDS[0], 6.0),)},
    "stop": {},  # as bad_words
    "stop_ids": {},
    "top_logprobs": {"top_logprobs": 3},
    "structured": {"grammar": regex('([ -~]|é|😀|"){5,30}')},
}
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def driver(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    tokenizer_dir = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(tokenizer_dir)
    return Driver(llama_dir, tokenizer_dir)


@pytest.fixture(scope="module")
def features(driver: Driver) -> dict[str, dict[str, Any]]:
    """FEATURES, with words and ends that the model would say."""
    plain = Sampling(MAX_TOKENS, temperature=0.0, ignore_eos=True)
    answer = driver.alone([Request("plain", PROMPT, plain)])["plain"]
    said, text = answer.token_ids, answer.text
    return FEATURES | {
        "bad_words": {"bad_words": ((said[0],), tuple(said[1:3]), (PROMPT[-1], said[1]))},
        "stop": {"stop": (text[4:6], f"{text[1:3]}?", "e", " the", "e ")},
        "stop_ids": {"stop_ids": (said[4],)},
    }


def request_of(name: str, *features: dict[str, Any]) -> Request:
    fields: dict[str, Any] = {"temperature": 0.0}
    for feature in features:
        bias = dict(fields.get("logit_bias", ())) | dict(feature.get("logit_bias", ()))
        fields |= feature | {"logit_bias": tuple(bias.items())}
    return Request(name, PROMPT, Sampling(MAX_TOKENS, **fields))


def test_each_feature_shows(driver: Driver, features: dict[str, dict[str, Any]]) -> None:
    """By itself, or beside one that lets it show: else the pairs below would prove nothing of it."""
    beside: dict[str, dict[str, Any]] = {
        "seed": {"temperature": 3.0},
        "n": {"temperature": 3.0},
        "top_k": {"temperature": 50.0},
        "top_p": {"temperature": 50.0},
        "min_p": {"temperature": 50.0},
        "min_tokens": END,
        "ignore_eos": END,
    }
    requests = []
    for name, feature in features.items():
        requests += [
            request_of(f"{name} on", beside.get(name, {}), feature),
            request_of(f"{name} off", beside.get(name, {})),
        ]
    found = driver.alone(requests)
    for name in features:
        assert found[f"{name} on"] != found[f"{name} off"], name
    assert len(found["min_tokens on"].token_ids) == 8  # 7, and the end that is by far the likeliest
    assert len(found["stop_ids on"].token_ids) == 5
    assert found["stop_ids on"].finish is found["stop on"].finish is Finish.STOP
    assert found["structured on"].text.isprintable()


PAIRS = list(itertools.combinations(FEATURES, 2))
_SHUFFLED = random.Random(1).sample(list(FEATURES), len(FEATURES))
SOME_PAIRS = list(zip(_SHUFFLED[::2], _SHUFFLED[1::2], strict=True))
"""Each feature once."""


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
@pytest.mark.parametrize(
    "pairs",
    [SOME_PAIRS, pytest.param(PAIRS, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=len,
)
def test_no_pair_of_features_is_changed_by_preemption_crash_or_resumption(
    pairs: list[tuple[str, str]], preemption: Preemption, driver: Driver, features: dict[str, dict[str, Any]]
) -> None:
    requests = [request_of(" and ".join(pair), *(features[name] for name in pair)) for pair in pairs]
    siblings = [
        replace(request, id=f"{request.id}, choice {choice}", sampling=replace(request.sampling, choice=choice))
        for request, pair in zip(requests, pairs, strict=True)
        if "n" in pair
        for choice in range(2)
    ]
    whole = driver.alone(requests)
    together = driver.run([*requests, *siblings], slots=6, preempt_after=2, preemption=preemption)
    for request in requests:
        compare(f"{request.id}, with others", together[request.id], whole[request.id])
        assert whole[request.id].text == text_at_once(whole[request.id], request.sampling), request.id
        check_preempted(request, whole[request.id], driver, preemption)
        check_crashed(request, whole[request.id], driver, preemption)


def check_preempted(request: Request, whole: Answer, driver: Driver, preemption: Preemption) -> None:
    if len(whole.token_ids) > 3:
        again = driver.run([request], slots=1, preempt_after=2, preemption=preemption)[request.id]
        compare(f"{request.id}, preempted", again, whole)


def check_crashed(request: Request, whole: Answer, driver: Driver, preemption: Preemption) -> None:
    """Its worker dies early, in the middle, and then once more; the attempt that goes on is preempted, or not."""
    name = request.id
    for after in (1, len(whole.token_ids) // 2):
        before = driver.crash(request, after=after, preemption=preemption)
        if before.finish is not None:
            continue  # its end came with the text that was waited for
        again = driver.resume(request, before, preemption=preemption)
        compare(f"{name}, crashed after {len(before.token_ids)}", again, whole)
        if len(whole.token_ids) - len(before.token_ids) > 3:
            again = driver.resume(request, before, preempt_after=2, preemption=preemption)
            compare(f"{name}, crashed after {len(before.token_ids)} and then preempted", again, whole)
            resumed = replace(request, resumed_ids=before.token_ids)
            before += driver.crash(resumed, after=1, preemption=preemption)
            if before.finish is None:
                again = driver.resume(request, before, preemption=preemption)
                compare(f"{name}, crashed twice", again, whole)


IDS = st.integers(0, VOCABULARY - 1) | st.sampled_from(EOS_IDS) | st.integers(-2, 2**40)
NUMBERS = st.floats() | st.floats(-2, 2) | st.sampled_from([0.0, 1.0, 5e-324, 1e6, -1e6, 1e-6])
FORMS = st.sampled_from([regex("[ -~]{3,9}"), regex("yes|no"), regex("a{2}"), regex("("), "", "start: nothing"])
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
        "stop": st.lists(st.text("ae t\ufffd\0", max_size=2), max_size=3).map(tuple),
        "stop_ids": st.lists(IDS, max_size=3).map(tuple),
        "top_logprobs": st.none() | st.integers(-1, 25),
        "grammar": st.none() | FORMS,
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
def neighbours_alone(driver: Driver) -> dict[str, Answer]:
    return driver.alone(NEIGHBOURS)


def check_mixture(mixture: list[Request], driver: Driver, neighbours_alone: dict[str, Answer]) -> None:
    """All end, each with a result or a sentence, and who has nothing to do with it has its own answer."""
    found = driver.run([*NEIGHBOURS, *mixture], slots=6)
    for request in mixture:
        answer = found[request.id]
        assert answer.finish in {Finish.STOP, Finish.LENGTH, Finish.ERROR}
        assert (answer.finish is Finish.ERROR) == bool(answer.error)
        assert all(0 <= token_id < VOCABULARY for token_id in answer.token_ids)
    for neighbour in NEIGHBOURS:
        compare(neighbour.id, found[neighbour.id], neighbours_alone[neighbour.id])


MIXTURES = st.lists(REQUESTS, min_size=10, max_size=10, unique_by=lambda request: request.id)
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=10, deadline=None, suppress_health_check=QUIET)
@given(mixture=MIXTURES)
def test_any_parameters_end_and_hurt_no_neighbour(
    mixture: list[Request], driver: Driver, neighbours_alone: dict[str, Answer]
) -> None:
    check_mixture(mixture, driver, neighbours_alone)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=500, deadline=None, suppress_health_check=QUIET)
@given(mixture=MIXTURES)
def test_five_thousand_parameters_end_and_hurt_no_neighbour(
    mixture: list[Request], driver: Driver, neighbours_alone: dict[str, Answer]
) -> None:
    check_mixture(mixture, driver, neighbours_alone)
