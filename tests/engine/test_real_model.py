"""The engine on a real model: 64 jobs of mixed length, batched, against transformers on each alone."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from engine.builder import build
from engine.config import EngineConfig
from engine.logprobs import logprobs_of
from engine.request import Engine, Finish, Output, Request, Sampling, TokenLogprob

TIE = 1e-4
"""Logits closer than this are a tie: fp32 sums in another order may decide it either way."""
LOGPROB_TOLERANCE = 5e-5
"""Of log-probabilities of two models in fp32: transformers is up to 1.6e-5 off its own in fp64 here, we are 3e-5."""
TEXT = (
    "The lighthouse keeper wrote down the weather every morning: wind from the west, a low sea, gulls on the rail. "
    "In the village below, people said that the light had never failed since the year of the great storm, when two "
    "ships were saved and a third was not. Nobody remembered the names. Water boils at a lower temperature on a "
    "mountain because the air presses on it less; sound travels faster in warm air than in cold; and a clock that "
    "moves runs slow. She taught these things to the children in winter, with chalk on the back of the door."
)


@dataclass
class Collected:
    """The outputs of an engine, put together; a request has an id that no other one of the engine had."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    finishes: dict[str, Finish] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, outputs: Sequence[Output]) -> None:
        with self.changed:
            for output in outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                self.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
                self.texts[output.request_id] = self.texts.get(output.request_id, "") + output.text
                if output.finish:
                    self.finishes[output.request_id] = output.finish
            self.changed.notify_all()

    def wait(self, engine: Engine, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.finishes) == count or engine.failure, timeout=600)
        assert engine.failure is None


Run = Callable[[Sequence[Request]], Collected]
"""What an engine has made of these requests and of those before them."""


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def jobs(tokenizer: Tokenizer) -> list[Request]:
    """64 greedy jobs: prompts of 3 to 110 tokens of prose, 4 to 24 tokens to generate."""
    ids, draw = tokenizer.encode(TEXT).ids, random.Random(64)
    jobs = []
    for index in range(64):
        length = draw.randint(3, len(ids))
        start = draw.randint(0, len(ids) - length)
        sampling = Sampling(draw.randint(4, 24), temperature=0.0, ignore_eos=index % 2 == 0)
        jobs.append(Request(str(index), tuple(ids[start : start + length]), sampling))
    return jobs


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Iterator[torch.nn.Module]:
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32, local_files_only=True)
    yield model.eval()


@contextmanager
def started(config: EngineConfig) -> Iterator[Run]:
    collected = Collected()
    engine = build(config)

    def run(requests: Sequence[Request]) -> Collected:
        expected = len(collected.finishes) + len(requests)
        for request in requests:
            engine.submit(request)
        collected.wait(engine, expected)
        assert engine.stats().blocks_used == 0
        return collected

    try:
        engine.start(collected)
        yield run
    finally:
        engine.close()


@pytest.fixture(scope="module")
def run(smollm2_dir: Path) -> Iterator[Run]:
    """An engine with the usual limits, for all tests of the module: a start takes seconds."""
    with started(EngineConfig(smollm2_dir, dtype="float32", kv_cache_gib=0.1)) as run:
        yield run


def find_ties(request: Request, generated: list[int], reference: torch.nn.Module) -> list[str]:
    """Where two logits tie; fails where a token is not transformers' choice after the tokens before it.

    One forward over prompt and output stands for generate: if each token is the greedy choice after those before it,
    the output is what greedy generation makes.
    """
    prompt = list(request.prompt_ids)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + generated[:-1]])).logits[0, len(prompt) - 1 :]
    ties = []
    for position, (token, row) in enumerate(zip(generated, logits, strict=True)):
        gap = float(row.max() - row[token])
        assert gap <= TIE, f"job {request.id}, token {position}: {token} is {gap:.2e} below {int(row.argmax())}"
        if token != int(row.argmax()):
            ties.append(f"job {request.id}, token {position}: {token} and {int(row.argmax())} tie within {gap:.1e}")
    return ties


def test_the_converted_model_is_a_plain_llama_in_bf16(smollm2_dir: Path) -> None:
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    with (smollm2_dir / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert {tensor["dtype"] for name, tensor in header.items() if name != "__metadata__"} == {"BF16"}
    assert (smollm2_dir / "tokenizer.json").is_file()
    assert "<|im_start|>" in (smollm2_dir / "chat_template.jinja").read_text()


@pytest.mark.parametrize("count", [8, pytest.param(64, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_batched_greedy_tokens_are_those_of_transformers_alone(
    count: int,
    jobs: list[Request],
    smollm2_dir: Path,
    reference: torch.nn.Module,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = EngineConfig(smollm2_dir, dtype="float32", max_num_seqs=count // 2, max_num_batched_tokens=48)
    with started(config) as run:
        collected = run(jobs[:count])
    for job in jobs[:count]:
        generated = collected.tokens[job.id]
        assert len(generated) == job.sampling.max_tokens or collected.finishes[job.id] is Finish.STOP
        ties = find_ties(job, generated, reference)
        with capsys.disabled():
            sys.stdout.writelines(f"{tie}\n" for tie in ties)


def test_text_is_what_the_tokens_say(run: Run, tokenizer: Tokenizer) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    request = Request("paris", tuple(tokenizer.encode(prompt).ids), Sampling(40, temperature=0.0))
    collected = run([request])
    assert collected.texts["paris"] == "The capital of France is Paris."
    assert collected.finishes["paris"] is Finish.STOP


def test_a_resumed_request_goes_on_with_the_same_random_stream(run: Run, jobs: list[Request]) -> None:
    sampling = Sampling(12, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True)
    whole = Request("whole", jobs[0].prompt_ids, sampling)
    tokens = run([whole, *jobs[1:4]]).tokens["whole"]
    rest = Request("rest", whole.prompt_ids, sampling, resumed_ids=tuple(tokens[:5]))
    assert run([rest]).tokens["rest"] == tokens[5:]


def test_logprobs_are_those_of_transformers(run: Run, jobs: list[Request], reference: torch.nn.Module) -> None:
    """Of the model alone, whatever the sampling makes of its logits."""
    samplings = [
        Sampling(8, temperature=0.0, ignore_eos=True, top_logprobs=5),
        Sampling(8, temperature=3.0, seed=1, ignore_eos=True, top_logprobs=20, logit_bias=((100, 5.0),)),
        Sampling(8, repetition_penalty=1.3, ignore_eos=True, top_logprobs=0, allowed_ids=tuple(range(9000))),
        Sampling(8, temperature=0.0, ignore_eos=True),
    ]
    asked = [
        replace(job, id=f"{job.id} with logprobs", sampling=sampling)
        for job, sampling in zip(jobs, samplings, strict=False)
    ]
    collected = run(asked)
    assert collected.logprobs[asked[-1].id] == []
    for request in asked[:-1]:
        tokens, found = collected.tokens[request.id], collected.logprobs[request.id]
        prompt = list(request.prompt_ids)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        for token_id, logprob, expected in zip(tokens, found, logits.log_softmax(-1), strict=True):
            assert logprob.token_id == token_id
            assert logprob.logprob == pytest.approx(float(expected[token_id]), abs=LOGPROB_TOLERANCE)
            assert len(logprob.top) == request.sampling.top_logprobs
            likeliest = expected.topk(len(logprob.top)).values.tolist()
            assert [value for _, value in logprob.top] == pytest.approx(likeliest, abs=LOGPROB_TOLERANCE)
            for other_id, value in logprob.top:
                assert value == pytest.approx(float(expected[other_id]), abs=LOGPROB_TOLERANCE)
        # From the same logits, the logarithms themselves are exact to the bits of fp32.
        truth = logits.double().log_softmax(-1)
        same = logprobs_of(logits, tokens, [Sampling(8, top_logprobs=20)] * len(tokens))
        for row, (token_id, logprob, top) in same.items():
            assert logprob == pytest.approx(float(truth[row, token_id]), abs=1e-5)
            assert [value for _, value in top] == pytest.approx(truth[row].topk(20).values.tolist(), abs=1e-5)
