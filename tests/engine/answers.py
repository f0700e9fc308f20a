"""A tiny random model behind a whole engine loop, for tests that preempt requests, crash under them and resume them."""

from __future__ import annotations

import codecs
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.config import EngineConfig
from engine.detokenizer import BYTE_ALPHABET, Detokenizer
from engine.grammars import Grammars
from engine.limits import Limits, Preemption
from engine.loop import EngineLoop
from engine.policies import POLICIES
from engine.request import Finish, Output, Request, Sampling, TokenLogprob
from engine.runner import ModelRunner
from engine.scheduler import Scheduler

VOCABULARY = 300
EOS_IDS = (2, 5)
_WORDS = (b" the", b"ing", "é".encode(), b"\xf0\x9f", b"\x98\x80", b'{"', b"th", b"er", b"\xe2\x82", b"\xac!")
BYTES_OF: dict[int, bytes] = {
    **{token_id: bytes([token_id]) for token_id in range(256) if token_id not in EOS_IDS},
    **dict(zip(EOS_IDS, (b"", b""), strict=True)),
    **{256 + place: _WORDS[place % len(_WORDS)] + b" " * (place // len(_WORDS)) for place in range(42)},
    **{298 + place: bytes([token_id]) for place, token_id in enumerate(EOS_IDS)},
}
"""What each token of the model says; its ends of sequence have no text."""


def write_tokenizer(directory: Path) -> None:
    """Bytes, some words, halves of characters, and two control tokens."""
    names = {token_id: "".join(BYTE_ALPHABET[byte] for byte in text) for token_id, text in BYTES_OF.items()}
    names |= {token_id: f"<|end {token_id}|>" for token_id in EOS_IDS}
    assert len(set(names.values())) == VOCABULARY
    tokenizer = Tokenizer(models.BPE(vocab={name: token_id for token_id, name in names.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(names[token_id], special=True) for token_id in EOS_IDS])
    tokenizer.save(str(directory / "tokenizer.json"))


@dataclass(frozen=True)
class Answer:
    """What came of a request, in one attempt or in several, one after the other."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Joined pieces, as a stream shows them."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    """None: its engine crashed."""
    error: str | None = None

    def __add__(self, later: Answer) -> Answer:
        """With what a later attempt made."""
        return Answer(
            self.token_ids + later.token_ids,
            self.text + later.text,
            self.logprobs + later.logprobs,
            later.finish,
            later.error,
        )


def joined(outputs: Sequence[Output]) -> Answer:
    """What they say together."""
    answer = Answer()
    for output in outputs:
        answer += Answer(output.token_ids, output.text, output.logprobs, output.finish, output.error)
    return answer


def persisted(outputs: Sequence[Output]) -> Answer:
    """What a worker that dies after these has written: tokens wait for the text that they are shown with."""
    shown = max((place for place, output in enumerate(outputs, 1) if output.text), default=0)
    return joined(outputs[:shown])


def text_at_once(answer: Answer, sampling: Sampling) -> str:
    """The text of all tokens decoded together, and cut before the stop string that is complete first."""
    token_ids = answer.token_ids
    if answer.finish is Finish.STOP and token_ids and token_ids[-1] in sampling.end_ids(frozenset(EOS_IDS)):
        token_ids = token_ids[:-1]
    text = b"".join(BYTES_OF[token_id] for token_id in token_ids).decode(errors="replace")
    early = b"".join(BYTES_OF[token_id] for token_id in token_ids[: sampling.min_tokens])
    early_length = len(codecs.getincrementaldecoder("utf-8")("replace").decode(early))  # without half a character
    for end in range(early_length + 1, len(text) + 1):
        if found := [len(stop) for stop in sampling.stop if text[:end].endswith(stop)]:
            return text[: end - max(found)]
    return text


class Driver:
    """Runs requests over the model, each time in a new engine."""

    def __init__(self, model_dir: Path, tokenizer_dir: Path) -> None:
        self.runner = ModelRunner(EngineConfig(model_dir, dtype="float32", kv_cache_gib=0.002, kv_swap_gib=0.001))
        self._detokenizer = Detokenizer.load(tokenizer_dir)
        self._grammars = Grammars.load(tokenizer_dir, vocab_size=VOCABULARY, eos_ids=EOS_IDS)

    def run(
        self,
        requests: Sequence[Request],
        *,
        slots: int,
        preempt_after: int | None = None,
        crash_after: int | None = None,
        preemption: Preemption = Preemption.AUTO,
    ) -> dict[str, Answer]:
        """What came of each request.

        preempt_after  once the first request has gained so many tokens, others come that take all the slots
        crash_after    once it has so many that are persisted, or ends, the engine is gone: persisted answers are told
        """
        runner = self.runner
        limits = Limits(
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
        )
        scheduler = Scheduler(limits, policy=POLICIES["priority"]())
        run = _Run(EngineLoop(runner, self._detokenizer, scheduler, self._grammars), scheduler, requests)
        run.intruders = slots if preempt_after is not None else 0
        run.preempt_after, run.crash_after = preempt_after, crash_after
        return run.answers()

    def alone(self, requests: Sequence[Request]) -> dict[str, Answer]:
        """One after the other."""
        return self.run(requests, slots=1)

    def crash(self, request: Request, *, after: int, preemption: Preemption) -> Answer:
        """What is persisted of a request whose engine is gone once so many tokens are."""
        return self.run([request], slots=1, crash_after=after, preemption=preemption)[request.id]

    def resume(
        self, request: Request, before: Answer, *, preempt_after: int | None = None, preemption: Preemption
    ) -> Answer:
        """What a new attempt makes of it, behind what is persisted."""
        again = replace(request, resumed_ids=before.token_ids)
        answers = self.run([again], slots=1, preempt_after=preempt_after, preemption=preemption)
        return before + answers[request.id]


class _Run:
    """One engine's life. The engine's thread calls it between steps."""

    def __init__(self, loop: EngineLoop, scheduler: Scheduler, requests: Sequence[Request]) -> None:
        self.preempt_after: int | None = None
        self.crash_after: int | None = None
        self.intruders = 0
        self._loop = loop
        self._scheduler = scheduler
        self._requests = requests
        self._outputs: dict[str, list[Output]] = {request.id: [] for request in requests}
        self._unfinished = set(self._outputs)
        self._has_preempted = False
        self._is_over = threading.Event()
        self._problem: BaseException | None = None

    def answers(self) -> dict[str, Answer]:
        for request in self._requests:
            self._loop.submit(replace(request, rank=1))
        self._loop.start(self._on_outputs)
        while not self._is_over.wait(0.2):
            assert self._loop.failure is None, self._loop.failure
        self._loop.close()
        if self._problem is not None:
            raise self._problem
        if self.crash_after is not None:
            return {request_id: persisted(outputs) for request_id, outputs in self._outputs.items()}
        assert not self._has_preempted or self._scheduler.stats().preemptions, "nobody was preempted"
        assert self._scheduler.stats().blocks_used == 0
        return {request_id: joined(outputs) for request_id, outputs in self._outputs.items()}

    def _on_outputs(self, outputs: Sequence[Output]) -> None:
        if self._is_over.is_set():
            return  # what the end aborts
        try:
            self._scheduler.check()
            for output in outputs:
                self._outputs.setdefault(output.request_id, []).append(output)
                if output.finish:
                    self._unfinished.discard(output.request_id)
            self._disturb()
        except BaseException as problem:
            self._problem = problem
            self._is_over.set()

    def _disturb(self) -> None:
        first = self._requests[0].id
        gained = self._outputs[first]
        is_running = first in self._unfinished
        if self.crash_after is not None and (not is_running or len(persisted(gained).token_ids) >= self.crash_after):
            self._loop.close()
            self._is_over.set()
        elif not self._unfinished:
            self._is_over.set()
        elif (
            self.preempt_after is not None
            and not self._has_preempted
            and len(joined(gained).token_ids) >= self.preempt_after
        ):
            self._has_preempted = is_running
            for slot in range(self.intruders):
                intruder = Request(f"intruder {slot}", (slot + 1,), Sampling(2, ignore_eos=True))
                self._loop.submit(intruder)
                self._unfinished.add(intruder.id)


def compare(name: str, found: Answer, expected: Answer) -> None:
    """All the same, to the bit but for log-probabilities: they are sums in another order."""
    assert found.token_ids == expected.token_ids, name
    assert (found.text, found.finish, found.error) == (expected.text, expected.finish, expected.error), name
    assert len(found.logprobs) == len(expected.logprobs), name
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.token_id == other.token_id, name
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4), name
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4), name
