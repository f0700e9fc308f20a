"""The engine's thread: every request ends exactly once, its text is whole, and nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.builder import scheduler_for
from engine.config import EngineConfig
from engine.detokenizer import Detokenizer
from engine.echo import EchoRunner, echo_token, write_model
from engine.loop import EngineLoop, EngineStoppedError
from engine.request import Engine, Finish, Output, Request, Sampling, TokenLogprob
from engine.step import Runner, Sampled, StepPlan

BOUND_S = 20.0
"""How long a test waits for what must happen."""


class Collector:
    """Keeps what the engine hands over, and lets a test wait for it."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self._changed = threading.Condition()

    def __call__(self, outputs: Sequence[Output]) -> None:
        assert outputs, "an empty list was handed over"
        ids = [output.request_id for output in outputs]
        assert len(ids) == len(set(ids)), "two outputs for one request in one step"
        with self._changed:
            ended = {output.request_id for output in self.outputs if output.finish}
            assert not ended & set(ids), "something came after the end"
            self.outputs.extend(outputs)
            self._changed.notify_all()

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(predicate, BOUND_S), "it did not happen"

    def wait_for_ends(self, *request_ids: str) -> None:
        self.wait_for(lambda: set(request_ids) <= {output.request_id for output in self.outputs if output.finish})

    def of(self, request_id: str) -> list[Output]:
        return [output for output in self.outputs if output.request_id == request_id]

    def text(self, request_id: str) -> str:
        return "".join(output.text for output in self.of(request_id))

    def tokens(self, request_id: str) -> list[int]:
        return [token_id for output in self.of(request_id) for token_id in output.token_ids]

    def finish(self, request_id: str) -> Finish | None:
        return self.of(request_id)[-1].finish


class ScriptRunner(EchoRunner):
    """Says the bytes of one text after a prompt of one token, then the end-of-sequence token."""

    def __init__(self, text: str, *, eos_id: int | None = None) -> None:
        super().__init__()
        if eos_id is not None:
            self.eos_ids = frozenset({eos_id})
        self.script = [*text.encode(), *self.eos_ids]

    def execute(self, plan: StepPlan) -> Sampled:
        ends = [chunk.start + len(chunk.token_ids) for chunk in plan.chunks if chunk.sampling]
        return Sampled([self.script[end - 1] for end in ends])


class GateRunner(EchoRunner):
    """Computes a step once the test lets it, and tells when it began."""

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.times_closed = 0

    def execute(self, plan: StepPlan) -> Sampled:
        self.began.release()
        assert self.gate.acquire(timeout=BOUND_S)
        return super().execute(plan)

    def close(self) -> None:
        self.times_closed += 1


class BrokenRunner(GateRunner):
    def execute(self, plan: StepPlan) -> Sampled:
        super().execute(plan)
        raise MemoryError("no memory left")


@pytest.fixture(scope="module")
def detokenizer(tmp_path_factory: pytest.TempPathFactory) -> Detokenizer:
    model_dir = tmp_path_factory.mktemp("echo")
    write_model(model_dir)
    return Detokenizer.load(model_dir)


@pytest.fixture
def make_loop(detokenizer: Detokenizer) -> Iterator[Callable[..., EngineLoop]]:
    made: list[EngineLoop] = []

    def make(runner: Runner, *, slots: int = 4, budget: int = 64) -> EngineLoop:
        config = EngineConfig(Path(), max_num_seqs=slots, max_num_batched_tokens=budget)
        made.append(EngineLoop(runner, detokenizer, scheduler_for(runner, config)))
        return made[-1]

    yield make
    for loop in made:
        loop.close()


MakeLoop = Callable[..., EngineLoop]


def test_requests_of_all_ranks_come_out_whole(make_loop: MakeLoop) -> None:
    loop: Engine = make_loop(EchoRunner(num_blocks=24), slots=3)
    collector = Collector()
    loop.start(collector)
    requests = [
        Request(f"r{i}", tuple(b"prompt" * (i % 4 + 1)), Sampling(max_tokens=10 + 7 * i, seed=i), rank=2 - i % 3)
        for i in range(12)
    ]
    for request in requests:
        loop.submit(request)
    collector.wait_for_ends(*(request.id for request in requests))
    for request in requests:
        start, count = len(request.prompt_ids), request.sampling.max_tokens
        expected = [echo_token(request.sampling.seed, start + i) for i in range(count)]
        assert collector.tokens(request.id) == expected
        assert collector.text(request.id) == bytes(expected).decode()
        assert collector.finish(request.id) is Finish.LENGTH
    steps = [output.step for output in collector.outputs]
    assert steps == sorted(steps)
    stats = loop.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.generated_tokens == sum(request.sampling.max_tokens for request in requests)
    assert loop.failure is None


def test_a_character_of_several_tokens_is_shown_whole_and_eos_adds_no_text(make_loop: MakeLoop) -> None:
    text = "a🙂é 👩‍👩‍👧 🇩🇪"
    loop, collector = make_loop(ScriptRunner(text)), Collector()
    loop.start(collector)
    loop.submit(Request("a", (1,), Sampling(max_tokens=100)))
    collector.wait_for_ends("a")
    assert [output.text for output in collector.of("a") if output.text] == list(text)
    assert collector.tokens("a") == ScriptRunner(text).script
    assert collector.finish("a") is Finish.STOP


def test_an_end_token_that_has_text_is_not_shown(make_loop: MakeLoop) -> None:
    loop, collector = make_loop(ScriptRunner("hi", eos_id=ord("!"))), Collector()
    loop.start(collector)
    loop.submit(Request("whole", (1,), Sampling(max_tokens=9)))
    loop.submit(Request("resumed", (1,), Sampling(max_tokens=9, stop=("i!",)), resumed_ids=tuple(b"hi!")))
    collector.wait_for_ends("whole", "resumed")
    assert bytes(collector.tokens("whole")) == b"hi!"
    assert (collector.text("whole"), collector.finish("whole")) == ("hi", Finish.STOP)
    assert (collector.text("resumed"), collector.finish("resumed")) == ("i", Finish.STOP)  # i was held back


def test_text_cut_off_inside_a_character_ends_as_a_whole_decode_would(make_loop: MakeLoop) -> None:
    loop, collector = make_loop(ScriptRunner("ab🙂")), Collector()
    loop.start(collector)
    loop.submit(Request("a", (1,), Sampling(max_tokens=4)))
    collector.wait_for_ends("a")
    assert collector.text("a") == "ab\ufffd"


def test_a_stop_string_ends_the_text_before_it_and_frees_the_request(make_loop: MakeLoop) -> None:
    loop, collector = make_loop(ScriptRunner("one END two")), Collector()
    loop.start(collector)
    loop.submit(Request("a", (1,), Sampling(max_tokens=100, stop=("END",))))
    collector.wait_for_ends("a")
    assert collector.text("a") == "one "
    assert collector.finish("a") is Finish.STOP
    assert bytes(collector.tokens("a")) == b"one END"
    assert loop.stats().blocks_used == 0


def test_text_held_for_a_stop_string_is_released_at_the_end(make_loop: MakeLoop) -> None:
    loop, collector = make_loop(ScriptRunner("one EN")), Collector()
    loop.start(collector)
    loop.submit(Request("by eos", (1,), Sampling(max_tokens=100, stop=("END",))))
    loop.submit(Request("by length", (1,), Sampling(max_tokens=5, stop=("END",))))
    collector.wait_for_ends("by eos", "by length")
    assert (collector.text("by eos"), collector.finish("by eos")) == ("one EN", Finish.STOP)
    assert (collector.text("by length"), collector.finish("by length")) == ("one E", Finish.LENGTH)


@pytest.mark.parametrize(
    ("stop", "max_tokens"), [((), 100), (("\n\n", "🙃"), 100), (("two",), 100), ((), 9), (("🙂 t",), 13)]
)
def test_a_resumed_request_continues_exactly_where_it_was_shown(
    make_loop: MakeLoop, stop: tuple[str, ...], max_tokens: int
) -> None:
    text = "one 🙂 two\n\n🙃 three"
    loop, collector = make_loop(ScriptRunner(text), slots=8), Collector()
    loop.start(collector)
    sampling = Sampling(max_tokens=max_tokens, stop=stop)
    loop.submit(Request("whole", (1,), sampling))
    collector.wait_for_ends("whole")
    whole = collector.of("whole")
    for cut in range(1, len(whole)):
        resumed_ids = tuple(collector.tokens("whole")[:cut])
        loop.submit(Request(f"cut {cut}", (1,), sampling, resumed_ids=resumed_ids))
    collector.wait_for_ends(*(f"cut {cut}" for cut in range(1, len(whole))))
    for cut in range(1, len(whole)):
        resumed = collector.of(f"cut {cut}")
        assert [(o.token_ids, o.text, o.finish) for o in resumed] == [
            (o.token_ids, o.text, o.finish) for o in whole[cut:]
        ]


@pytest.mark.parametrize(
    ("resumed", "stop", "max_tokens", "rest", "finish"),
    [
        ("one END", ("END",), 100, "", Finish.STOP),
        ("one E", ("END",), 5, "E", Finish.LENGTH),  # the text that was held back
        ("one EN\u0100", ("END",), 100, "EN", Finish.STOP),  # Ā stands for the end-of-sequence token
    ],
)
def test_a_request_that_was_complete_when_its_worker_died_ends_at_once(
    make_loop: MakeLoop, resumed: str, stop: tuple[str, ...], max_tokens: int, rest: str, finish: Finish
) -> None:
    runner = EchoRunner()
    loop, collector = make_loop(runner), Collector()
    loop.start(collector)
    (eos_id,) = runner.eos_ids
    resumed_ids = tuple(eos_id if character == "\u0100" else ord(character) for character in resumed)
    loop.submit(Request("a", (1,), Sampling(max_tokens=max_tokens, stop=stop), resumed_ids=resumed_ids))
    collector.wait_for_ends("a")
    assert [(o.token_ids, o.text, o.finish) for o in collector.of("a")] == [((), rest, finish)]
    assert loop.stats().steps == 0


def test_a_request_that_cannot_be_computed_ends_with_a_sentence(make_loop: MakeLoop) -> None:
    loop, collector = make_loop(EchoRunner()), Collector()
    loop.start(collector)
    loop.submit(Request("a", (1,) * 9000, Sampling(max_tokens=5)))
    collector.wait_for_ends("a")
    (output,) = collector.of("a")
    assert output.finish is Finish.ERROR
    assert output.error == "The prompt has 9000 tokens; a context of 8192 has no room to answer it."
    assert (output.text, output.token_ids) == ("", ())


def test_nothing_is_made_of_the_fields_of_a_request_that_is_refused(make_loop: MakeLoop) -> None:
    """A resumed one brings text, which an empty stop string cannot be looked for in."""
    loop, collector = make_loop(EchoRunner()), Collector()
    loop.start(collector)
    loop.submit(Request("wrong", (1,), Sampling(9, stop=("",)), resumed_ids=(97, 98)))
    loop.submit(Request("right", (1,), Sampling(3)))
    collector.wait_for_ends("wrong", "right")
    (end,) = collector.of("wrong")
    assert (end.finish, end.error, end.text) == (Finish.ERROR, "A stop string is empty.", "")
    assert loop.failure is None


def test_a_stop_token_ends_the_text_and_has_none(make_loop: MakeLoop) -> None:
    loop, collector = make_loop(ScriptRunner("hi!")), Collector()
    loop.start(collector)
    loop.submit(Request("a", (1,), Sampling(max_tokens=9, stop_ids=(ord("!"),), ignore_eos=True)))
    collector.wait_for_ends("a")
    assert bytes(collector.tokens("a")) == b"hi!"
    assert (collector.text("a"), collector.finish("a")) == ("hi", Finish.STOP)


@pytest.mark.parametrize(
    ("fields", "min_tokens", "text"),
    [
        ({"stop": ("END",)}, 6, "one "),  # complete with token 7
        ({"stop": ("END",)}, 7, "one END two "),
        ({"stop": ("END",)}, 14, "one END two "),  # begins early
        ({"stop_ids": (ord("E"),)}, 4, "one "),
        ({"stop_ids": (ord("E"),)}, 5, "one END two "),
    ],
)
def test_nothing_ends_a_text_before_min_tokens(
    make_loop: MakeLoop, fields: dict[str, Any], min_tokens: int, text: str
) -> None:
    loop, collector = make_loop(ScriptRunner("one_END two END")), Collector()
    loop.start(collector)
    sampling = Sampling(max_tokens=99, min_tokens=min_tokens, **fields)
    loop.submit(Request("whole", (1,), sampling))
    collector.wait_for_ends("whole")
    assert collector.text("whole").replace("_", " ") == text
    assert collector.finish("whole") is Finish.STOP
    for cut in range(1, len(collector.of("whole"))):
        resumed_ids = tuple(collector.tokens("whole")[:cut])
        loop.submit(Request(f"cut {cut}", (1,), sampling, resumed_ids=resumed_ids))
        collector.wait_for_ends(f"cut {cut}")
        assert [(o.text, o.finish) for o in collector.of(f"cut {cut}")] == [
            (o.text, o.finish) for o in collector.of("whole")[cut:]
        ]


def test_each_token_carries_its_logprob_where_asked_for(make_loop: MakeLoop) -> None:
    loop, collector = make_loop(EchoRunner()), Collector()
    loop.start(collector)
    loop.submit(Request("asked", (1,), Sampling(max_tokens=5, seed=3, top_logprobs=2)))
    loop.submit(Request("not asked", (1,), Sampling(max_tokens=5, seed=3)))
    collector.wait_for_ends("asked", "not asked")
    assert [o.logprobs for o in collector.of("asked")] == [
        tuple(TokenLogprob(token_id, 0.0, ((token_id, 0.0),)) for token_id in o.token_ids)
        for o in collector.of("asked")
    ]
    assert not any(o.logprobs for o in collector.of("not asked"))


def test_a_row_for_which_no_token_is_left_ends_alone(make_loop: MakeLoop) -> None:
    class Stuck(EchoRunner):
        """Finds no token for the requests whose sampling allows but one, once they have three tokens."""

        def execute(self, plan: StepPlan) -> Sampled:
            sampled = super().execute(plan)
            stuck = [
                place
                for place, chunk in enumerate(plan.sampling_chunks)
                if (sampling := plan.samplings[chunk]) and sampling.allowed_ids and plan.starts[chunk] >= 3
            ]
            return sampled._replace(errors=dict.fromkeys(stuck, "No token may follow."))

    loop, collector = make_loop(Stuck()), Collector()
    loop.start(collector)
    loop.submit(Request("stuck", (1,), Sampling(max_tokens=9, allowed_ids=(1,))))
    loop.submit(Request("free", (1,), Sampling(max_tokens=9, seed=1)))
    collector.wait_for_ends("stuck", "free")
    assert len(collector.tokens("stuck")) == 3
    assert (collector.finish("stuck"), collector.of("stuck")[-1].error) == (Finish.ERROR, "No token may follow.")
    assert collector.tokens("free") == [echo_token(1, 1 + i) for i in range(9)]
    assert loop.stats().generated_tokens == 12
    assert loop.stats().blocks_used == 0


def test_abort_takes_effect_with_the_next_step_whatever_the_state(make_loop: MakeLoop) -> None:
    runner = GateRunner()
    loop, collector = make_loop(runner, slots=1), Collector()
    loop.start(collector)
    loop.submit(Request("running", (1,), Sampling(max_tokens=1000)))
    loop.submit(Request("waiting", (1,), Sampling(max_tokens=1000)))
    assert runner.began.acquire(timeout=BOUND_S)
    for request_id in ("running", "waiting", "running", "unknown"):
        loop.abort(request_id)
    runner.gate.release()  # the step that was being computed, and no other
    collector.wait_for_ends("running", "waiting")
    assert collector.finish("running") is collector.finish("waiting") is Finish.ABORTED
    assert len(collector.tokens("running")) == 1
    assert [(o.token_ids, o.text) for o in collector.of("waiting")] == [((), "")]
    stats = loop.stats()
    assert (stats.steps, stats.running, stats.waiting, stats.blocks_used) == (1, 0, 0, 0)


def test_an_abort_shows_nothing_that_was_held_back(make_loop: MakeLoop) -> None:
    loop, collector = make_loop(ScriptRunner("ab" * 4000)), Collector()

    def abort_inside_the_stop_string(outputs: Sequence[Output]) -> None:
        collector(outputs)
        if outputs[0].token_ids == (ord("b"),):
            loop.abort("a")

    loop.start(abort_inside_the_stop_string)
    loop.submit(Request("a", (1,), Sampling(max_tokens=5000, stop=("b" + "ab" * 3000,))))
    collector.wait_for_ends("a")
    assert collector.finish("a") is Finish.ABORTED
    assert collector.text("a") == "a"


def test_an_id_may_come_again_once_its_end_was_handed_over(make_loop: MakeLoop) -> None:
    loop = make_loop(EchoRunner())
    ends: list[Output] = []
    twice = threading.Event()

    def resubmit(outputs: Sequence[Output]) -> None:
        ends.extend(output for output in outputs if output.finish)
        if len(ends) == 2:
            twice.set()
        elif ends:
            loop.submit(Request("a", (1,), Sampling(max_tokens=1)))

    loop.start(resubmit)
    loop.submit(Request("a", (1,), Sampling(max_tokens=1)))
    assert twice.wait(BOUND_S)


def test_an_id_that_is_live_is_refused(make_loop: MakeLoop) -> None:
    loop = make_loop(EchoRunner())
    loop.submit(Request("a", (1,), Sampling(max_tokens=1)))
    with pytest.raises(ValueError, match="already in the engine"):
        loop.submit(Request("a", (1,), Sampling(max_tokens=1)))


def test_requests_are_counted_from_their_submission_on(make_loop: MakeLoop) -> None:
    loop = make_loop(EchoRunner())
    for index, rank in enumerate((0, 2, 2)):
        loop.submit(Request(str(index), (1,), Sampling(max_tokens=1), rank=rank))
    stats = loop.stats()
    assert (stats.waiting, stats.waiting_by_rank, stats.running_by_rank) == (3, (1, 0, 2), (0, 0, 0))


def test_requests_and_aborts_from_many_threads_end_once_each(make_loop: MakeLoop) -> None:
    loop, collector = make_loop(EchoRunner(num_blocks=40), slots=8), Collector()
    loop.start(collector)
    ids = [[f"{thread}.{index}" for index in range(40)] for thread in range(8)]

    def submit(own: list[str]) -> None:
        for index, request_id in enumerate(own):
            loop.submit(Request(request_id, (1, 2), Sampling(max_tokens=1 + index), rank=index % 3))
            if index % 4 == 3:
                loop.abort(own[index - 3])
                loop.abort(request_id)

    threads = [threading.Thread(target=submit, args=(own,)) for own in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    collector.wait_for_ends(*(request_id for own in ids for request_id in own))
    assert {output.finish for output in collector.outputs if output.finish} <= {Finish.LENGTH, Finish.ABORTED}
    assert loop.stats().blocks_used == 0


def test_a_higher_tier_joins_the_next_step_of_a_full_batch(make_loop: MakeLoop) -> None:
    runner = GateRunner()
    loop, collector = make_loop(runner, slots=2), Collector()
    loop.start(collector)
    for index in range(2):
        loop.submit(Request(f"bulk{index}", (1,), Sampling(max_tokens=500, seed=index), rank=2))
    for _ in range(8):
        runner.gate.release()
    collector.wait_for(lambda: len(collector.outputs) >= 14)
    loop.submit(Request("paid", (1,), Sampling(max_tokens=5), rank=0))
    submitted_at = loop.stats().steps
    for _ in range(2000):
        runner.gate.release()
    collector.wait_for_ends("paid", "bulk0", "bulk1")
    assert collector.of("paid")[0].step <= submitted_at + 2, "the step that was being computed, and the next"
    assert loop.stats().preemptions == 1
    for index in range(2):
        assert collector.tokens(f"bulk{index}") == [echo_token(index, 1 + i) for i in range(500)]


def test_close_aborts_what_is_left_and_may_be_called_again(make_loop: MakeLoop) -> None:
    runner = GateRunner()
    loop, collector = make_loop(runner, slots=1), Collector()
    loop.start(collector)
    for request_id in ("a", "b"):
        loop.submit(Request(request_id, (1,), Sampling(max_tokens=1000)))
    assert runner.began.acquire(timeout=BOUND_S)
    closer = threading.Thread(target=loop.close)
    closer.start()
    runner.gate.release()
    closer.join(BOUND_S)
    loop.close()
    assert collector.finish("a") is collector.finish("b") is Finish.ABORTED
    assert runner.times_closed == 1
    assert (loop.stats().running, loop.stats().waiting, loop.stats().blocks_used) == (0, 0, 0)
    with pytest.raises(EngineStoppedError, match="the engine is closed"):
        loop.submit(Request("c", (1,), Sampling(max_tokens=1)))
    loop.abort("a")


def test_close_from_the_engines_own_thread_ends_it(make_loop: MakeLoop) -> None:
    runner = GateRunner()
    runner.gate.release()
    loop, collector = make_loop(runner), Collector()

    def close_at_once(outputs: Sequence[Output]) -> None:
        collector(outputs)
        loop.close()

    loop.start(close_at_once)
    loop.submit(Request("a", (1,), Sampling(max_tokens=1000)))
    collector.wait_for_ends("a")
    loop.close()
    assert collector.finish("a") is Finish.ABORTED
    assert runner.times_closed == 1


def test_close_without_start_closes_the_runner_once(make_loop: MakeLoop) -> None:
    runner = GateRunner()
    loop = make_loop(runner)
    loop.close()
    loop.close()
    assert runner.times_closed == 1


def test_an_engine_starts_once(make_loop: MakeLoop) -> None:
    loop = make_loop(EchoRunner())
    loop.start(Collector())
    with pytest.raises(RuntimeError, match="started before"):
        loop.start(Collector())


def test_a_dead_thread_says_why_and_invents_no_results(make_loop: MakeLoop, caplog: pytest.LogCaptureFixture) -> None:
    runner = BrokenRunner()
    runner.gate.release()
    loop, collector = make_loop(runner), Collector()
    loop.start(collector)
    loop.submit(Request("a", (1,), Sampling(max_tokens=5)))
    assert runner.began.acquire(timeout=BOUND_S)
    loop.close()
    assert loop.failure == "MemoryError: no memory left"
    assert collector.outputs == []
    assert "the engine's thread died" in caplog.text
    assert runner.times_closed == 1
    with pytest.raises(EngineStoppedError, match="MemoryError: no memory left"):
        loop.submit(Request("b", (1,), Sampling(max_tokens=1)))
