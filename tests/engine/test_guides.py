"""Requests with grammars in the engine: compiled beside its thread, kept to whatever happens, ended with them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from engine import guides as module
from engine.builder import scheduler_for
from engine.config import EngineConfig
from engine.detokenizer import Detokenizer
from engine.echo import EchoRunner, write_model
from engine.grammars import GrammarError, Grammars, Guide
from engine.loop import EngineLoop
from engine.request import Finish, Request, Sampling
from tests.guiding import Collector, regex, schema

EOS = next(iter(EchoRunner().eos_ids))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é😀"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


class GatedGrammars(Grammars):
    """Compiles a grammar once the test lets it; one that is named first is never let."""

    stuck: str | None = None

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        self.began = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.never = threading.Event()

    def compile(self, grammar: str, token_ids: Sequence[int]) -> Guide:
        self.began.release()
        if grammar == self.stuck:
            self.never.wait()
        assert self.gate.acquire(timeout=20.0)
        return super().compile(grammar, token_ids)


@pytest.fixture(scope="module")
def echo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("echo")
    write_model(directory)
    return directory


MakeLoop = Callable[..., EngineLoop]


@pytest.fixture
def make_loop(echo_dir: Path) -> Iterator[MakeLoop]:
    made: list[EngineLoop] = []

    def make(
        grammars: Grammars | None = None, *, slots: int = 4, num_blocks: int = 1024, policy: str = "tiered"
    ) -> EngineLoop:
        runner = EchoRunner(num_blocks=num_blocks)
        scheduler = scheduler_for(runner, EngineConfig(Path(), max_num_seqs=slots, policy=policy))
        made.append(EngineLoop(runner, Detokenizer.load(echo_dir), scheduler, grammars or load(Grammars, echo_dir)))
        return made[-1]

    yield make
    for loop in made:
        loop.close()


def load(kind: type[Grammars], echo_dir: Path) -> Any:
    runner = EchoRunner()
    return kind.load(echo_dir, vocab_size=runner.vocab_size, eos_ids=runner.eos_ids)


@pytest.fixture
def gated(echo_dir: Path) -> Iterator[GatedGrammars]:
    grammars: GatedGrammars = load(GatedGrammars, echo_dir)
    yield grammars
    grammars.never.set()
    grammars.gate.release(9)


def person(name: str, seed: int, **fields: Any) -> Request:
    return Request(name, tuple(b"who? "), Sampling(4000, seed=seed, grammar=schema(PERSON)), **fields)


def test_texts_are_whole_and_of_their_form(make_loop: MakeLoop) -> None:
    loop, collector = make_loop(), Collector()
    loop.start(collector)
    requests = [person(f"json {seed}", seed) for seed in range(9)]
    forms = {"regex": "[a-f]{3}-(yes|no)", "choice": "red|green|blue", "open": "x+y?"}
    requests += [Request(name, (1,), Sampling(99, seed=3, grammar=regex(form))) for name, form in forms.items()]
    requests.append(Request("plain", (1,), Sampling(20, seed=1)))
    for request in requests:
        loop.submit(request)
    for request in requests:
        assert collector.end_of(request.id).finish is (Finish.LENGTH if request.id == "plain" else Finish.STOP)
        if request.id.startswith("json"):
            jsonschema.validate(json.loads(collector.text(request.id)), PERSON)
            assert bytes(collector.tokens(request.id)).decode() == collector.text(request.id)
    for name, form in forms.items():
        assert re.fullmatch(form, collector.text(name))
    stats = loop.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def test_a_whole_text_ends_without_a_token_for_it_and_an_open_one_with_the_models(make_loop: MakeLoop) -> None:
    loop, collector = make_loop(), Collector()
    loop.start(collector)
    for name, fields in {"plain": {}, "ignored": {"ignore_eos": True}, "least": {"min_tokens": 50}, "last": {}}.items():
        most = 3 if name == "last" else 99
        loop.submit(Request(name, (1,), Sampling(most, grammar=regex("a[bc]d"), **fields)))
        assert collector.end_of(name).finish is Finish.STOP
        assert bytes(collector.tokens(name)).decode() == collector.text(name)
        assert len(collector.text(name)) == 3
    loop.submit(Request("open", (1,), Sampling(99, seed=5, grammar=regex("a+"))))
    assert collector.end_of("open").finish is Finish.STOP
    assert collector.tokens("open")[-1] == EOS
    assert collector.text("open") == "a" * (len(collector.tokens("open")) - 1)
    loop.submit(Request("empty", (1,), Sampling(9, grammar=regex("a{0}"))))
    assert (collector.end_of("empty").finish, collector.text("empty")) == (Finish.STOP, "")
    loop.submit(Request("cut", (1,), Sampling(5, grammar=regex("a{9}"))))
    assert collector.end_of("cut").finish is Finish.LENGTH
    assert collector.text("cut") == "aaaaa"


def test_a_resumed_request_goes_on_as_it_would_have(make_loop: MakeLoop) -> None:
    loop, collector = make_loop(), Collector()
    loop.start(collector)
    whole = person("whole", 7)
    loop.submit(whole)
    collector.end_of("whole")
    tokens, outputs = collector.tokens("whole"), collector.outputs["whole"]
    for cut in (1, 7, len(tokens) // 2, len(tokens) - 1, len(tokens)):
        loop.submit(replace(whole, id=f"cut {cut}", resumed_ids=tokens[:cut]))
        assert collector.end_of(f"cut {cut}").finish is Finish.STOP
        assert collector.tokens(f"cut {cut}") == tokens[cut:]
        assert collector.text(f"cut {cut}") == "".join(output.text for output in outputs[cut:])


def test_a_preempted_request_makes_the_text_that_it_makes_alone(make_loop: MakeLoop) -> None:
    alone, crowd = Collector(), Collector()
    requests = [person(f"r{seed}", seed, rank=2 - seed % 3) for seed in range(12)]
    loop = make_loop()
    loop.start(alone)
    for request in requests:
        loop.submit(request)
        alone.end_of(request.id)
    crowded = make_loop(slots=3, num_blocks=14)  # of 16 tokens: for two of the texts
    crowded.start(crowd)
    for request in requests:
        crowded.submit(request)
    for request in requests:
        assert crowd.end_of(request.id).finish is Finish.STOP
        assert crowd.tokens(request.id) == alone.tokens(request.id)
        assert crowd.text(request.id) == alone.text(request.id)
    assert crowded.stats().preemptions > 0


# ---- while a grammar is compiled


def test_a_request_waits_for_its_grammar_and_others_do_not(make_loop: MakeLoop, gated: GatedGrammars) -> None:
    loop, collector = make_loop(gated), Collector()
    loop.start(collector)
    loop.submit(person("waits", 1, rank=1))
    assert gated.began.acquire(timeout=20.0)
    loop.submit(Request("plain", (1,), Sampling(30)))
    collector.end_of("plain")
    assert "waits" not in collector.outputs
    stats = loop.stats()
    assert (stats.waiting, stats.compiling, stats.running, stats.waiting_by_rank) == (1, 1, 0, (0, 1))
    with pytest.raises(ValueError, match="already"):
        loop.submit(person("waits", 1))
    gated.gate.release()
    assert collector.end_of("waits").finish is Finish.STOP
    assert (loop.stats().waiting, loop.stats().compiling) == (0, 0)


def test_a_request_can_be_aborted_while_its_grammar_is_compiled(make_loop: MakeLoop, gated: GatedGrammars) -> None:
    loop, collector = make_loop(gated), Collector()
    loop.start(collector)
    loop.submit(Request("a", (1,), Sampling(99, grammar=regex("first"))))
    assert gated.began.acquire(timeout=20.0)
    loop.abort("a")
    assert collector.end_of("a").finish is Finish.ABORTED
    del collector.outputs["a"]
    loop.submit(Request("a", (1,), Sampling(99, grammar=regex("second"))))  # by the same name
    assert gated.began.acquire(timeout=20.0)
    gated.gate.release(2)
    assert collector.end_of("a").finish is Finish.STOP
    assert collector.text("a") == "second"
    loop.submit(Request("b", (1,), Sampling(99, grammar=regex("third"))))
    assert gated.began.acquire(timeout=20.0)
    loop.close()
    assert collector.end_of("b").finish is Finish.ABORTED


def test_a_grammar_that_does_not_compile_in_time_is_given_up_and_holds_up_nobody(
    make_loop: MakeLoop, gated: GatedGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.1)
    gated.stuck = regex("never")
    loop, collector = make_loop(gated), Collector()
    loop.start(collector)
    for index in range(5):
        loop.submit(Request(f"stuck {index}", (1,), Sampling(9, grammar=gated.stuck)))
    for index in range(5):
        end = collector.end_of(f"stuck {index}")
        assert (end.finish, end.error) == (Finish.ERROR, "The grammar did not compile within 0.1 s.")
    gated.gate.release()
    monkeypatch.undo()
    loop.submit(Request("good", (1,), Sampling(9, grammar=regex("ab"))))
    assert collector.end_of("good").finish is Finish.STOP
    assert loop.stats().waiting == 0


# ---- without hope


@pytest.mark.parametrize(
    ("fields", "message", "text"),
    [
        ({"grammar": "start: word"}, "The grammar cannot be compiled", ""),
        ({"grammar": regex("(")}, "The grammar cannot be compiled", ""),
        ({"grammar": schema({"$ref": "#"})}, "The grammar cannot be", ""),
        ({"grammar": LLMatcher.grammar_from_lark('start: "ab" <[256]>')}, "No token may follow", "ab"),
    ],
)
def test_a_hopeless_grammar_ends_its_request_with_a_sentence(
    fields: dict[str, Any], message: str, text: str, make_loop: MakeLoop
) -> None:
    loop, collector = make_loop(), Collector()
    loop.start(collector)
    loop.submit(Request("good", (1,), Sampling(99, grammar=regex("[a-z]{40}"))))
    loop.submit(Request("bad", (1,), Sampling(9, **fields)))
    end = collector.end_of("bad")
    assert end.finish is Finish.ERROR
    assert end.error is not None and end.error.startswith(message)
    assert collector.text("bad") == text
    assert collector.end_of("good").finish is Finish.STOP
    assert loop.failure is None
    assert loop.stats().blocks_used == 0


def test_tokens_of_another_grammar_end_it_and_a_completed_request_needs_none(make_loop: MakeLoop) -> None:
    loop, collector = make_loop(), Collector()
    loop.start(collector)
    loop.submit(Request("other", (1,), Sampling(9, grammar=regex("ab")), resumed_ids=tuple(b"x")))
    end = collector.end_of("other")
    assert end.finish is Finish.ERROR and end.error is not None and "tokens so far do not fit" in end.error
    loop.submit(Request("done", (1,), Sampling(9, grammar=regex("ab"), stop_ids=(120,)), resumed_ids=tuple(b"ax")))
    assert collector.end_of("done").finish is Finish.STOP


def test_an_engine_without_grammars_says_so(echo_dir: Path) -> None:
    runner = EchoRunner()
    scheduler = scheduler_for(runner, EngineConfig(Path()))
    loop, collector = EngineLoop(runner, Detokenizer.load(echo_dir), scheduler, GrammarError("None here.")), Collector()
    loop.start(collector)
    loop.submit(Request("a", (1,), Sampling(9, grammar=regex("ab"))))
    end = collector.end_of("a")
    assert (end.finish, end.error) == (Finish.ERROR, "None here.")
    loop.submit(Request("b", (1,), Sampling(9)))
    assert collector.end_of("b").finish is Finish.LENGTH
    loop.close()
