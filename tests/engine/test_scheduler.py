"""The scheduler: who is computed in the next step, and that nothing is lost on the way.

Steps are computed by CacheModel, which keeps tokens where a real runner keeps keys and values: a token written to a
wrong block, or over somebody else's, changes what comes out.
"""

from __future__ import annotations

import dataclasses
import gc
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cost import Coefficients, StepCost
from engine.limits import Limits, Preemption, Prefill
from engine.policies import POLICIES
from engine.policies.tiered import Tiered
from engine.request import Finish, Request, Sampling
from engine.scheduler import Scheduler
from engine.sequence import Sequence as TokenLine
from engine.step import Moves, Progress, Sampled, StepPlan
from engine.waiting import MAX_PASSED_BY

EOS = 0
VOCABULARY = 23


def next_token(prefix: Sequence[int]) -> int:
    """The token after a prefix: a function of all of it, about one in 23 ends the text."""
    state = 7
    for token_id in prefix:
        state = (state * 31 + token_id + 1) % 100_003
    return state % VOCABULARY


class CacheModel:
    """Computes plans from a cache of tokens by (block, offset), as a model does from keys and values."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.cache: dict[tuple[int, int], int] = {}
        self.host: dict[int, list[int | None]] = {}

    def _move(self, moves: Moves) -> None:
        for block, host in moves.swaps_out:
            self.host[host] = self._read(block)
        for source, target in moves.copies:
            self._write(target, self._read(source))
        for host, block in moves.swaps_in:
            self._write(block, self.host[host])

    def _read(self, block: int) -> list[int | None]:
        return [self.cache.get((block, offset)) for offset in range(self.block_size)]

    def _write(self, block: int, tokens: list[int | None]) -> None:
        for offset, token_id in enumerate(tokens):
            if token_id is not None:
                self.cache[block, offset] = token_id

    def execute(self, plan: StepPlan) -> Sampled:
        self._move(plan.moves)
        for chunk in plan.chunks:
            for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
                self.cache[self._place(chunk.block_ids, position)] = token_id
        token_ids = [
            next_token([self.cache[self._place(chunk.block_ids, p)] for p in range(chunk.start + len(chunk.token_ids))])
            for chunk in plan.chunks
            if chunk.sampling is not None
        ]
        return Sampled(token_ids)

    def _place(self, block_ids: tuple[int, ...], position: int) -> tuple[int, int]:
        return block_ids[position // self.block_size], position % self.block_size


class Bench:
    """A scheduler with a CacheModel; collects what comes out and checks the books after every step."""

    def __init__(
        self,
        *,
        slots: int = 4,
        budget: int = 32,
        num_blocks: int = 64,
        block_size: int = 4,
        context_length: int = 64,
        policy: str = "priority",
        cost: StepCost | None = None,
        **limits: Any,
    ) -> None:
        plain = {"preemption": Preemption.RECOMPUTE, "quantum_steps": 1, "max_preemptions": 99, "prefix_cache": False}
        self.scheduler = Scheduler(
            Limits(
                block_size=block_size,
                num_blocks=num_blocks,
                context_length=context_length,
                eos_ids=frozenset({EOS}),
                max_num_seqs=slots,
                max_num_batched_tokens=budget,
                **{**plain, **limits},
            ),
            policy=POLICIES[policy](),
            cost=cost,
        )
        self.context_length = min(context_length, num_blocks * block_size)
        self.budget = budget
        self.model = CacheModel(block_size)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Progress] = {}

    def add(
        self,
        request_id: str,
        *,
        prompt: int = 3,
        max_tokens: int = 5,
        rank: int = 0,
        resumed_ids: tuple[int, ...] = (),
        ignore_eos: bool = True,
        start: int | None = None,
        **fields: Any,
    ) -> Request:
        """A request whose prompt has `prompt` tokens; by default it ends by its length alone."""
        first = len(request_id) * 5 if start is None else start
        request = Request(
            id=request_id,
            prompt_ids=tuple((first + i) % VOCABULARY for i in range(prompt)),
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos),
            resumed_ids=resumed_ids,
            rank=rank,
            **fields,
        )
        self.tokens[request_id] = []
        if end := self.scheduler.add(request):
            self._note(end)
        return request

    def step(self) -> list[tuple[str, int]]:
        """One step; the ids it computed, with how many tokens of each, in order."""
        plan = self.scheduler.plan()
        if plan is None:
            return []
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) <= self.budget
        self.scheduler.check()
        for progress in self.scheduler.commit(plan, self.model.execute(plan)):
            self._note(progress)
        self.scheduler.check()
        return [(chunk.request_id, len(chunk.token_ids)) for chunk in plan.chunks]

    def run(self) -> None:
        """Steps until nothing is live; a livelock fails."""
        for _ in range(5000):
            if not self.step():
                break
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)

    def _note(self, progress: Progress) -> None:
        assert progress.request_id not in self.ends, "something came after the end"
        self.tokens[progress.request_id] += progress.token_ids
        if progress.finish:
            self.ends[progress.request_id] = progress

    def finish_of(self, request_id: str) -> Finish | None:
        return self.ends[request_id].finish


def alone(request: Request, context_length: int) -> tuple[list[int], Finish]:
    """What a request generates with the machine to itself, resumed tokens not counted."""
    tokens = [*request.prompt_ids, *request.resumed_ids]
    generated = list(request.resumed_ids)
    while True:
        if generated and generated[-1] == EOS and not request.sampling.ignore_eos:
            return generated[len(request.resumed_ids) :], Finish.STOP
        if len(generated) >= request.sampling.max_tokens or len(tokens) >= context_length:
            return generated[len(request.resumed_ids) :], Finish.LENGTH
        generated.append(next_token(tokens))
        tokens.append(generated[-1])


def test_a_waiting_request_joins_in_the_step_after_a_slot_is_free() -> None:
    bench = Bench(slots=2)
    for name, max_tokens in (("short", 2), ("long", 4), ("next", 2)):
        bench.add(name, max_tokens=max_tokens)
    assert bench.step() == [("short", 3), ("long", 3)]
    assert bench.step() == [("short", 1), ("long", 1)]
    assert bench.step() == [("long", 1), ("next", 3)]
    assert bench.step() == [("long", 1), ("next", 1)]
    assert bench.step() == []
    assert set(bench.ends) == {"short", "long", "next"}


def test_decodes_come_first_and_several_prefills_share_the_rest() -> None:
    bench = Bench(slots=4, budget=10)
    bench.add("a", prompt=2, max_tokens=9)
    bench.step()
    bench.add("b", prompt=5, max_tokens=9)
    bench.add("c", prompt=20, max_tokens=9)
    bench.add("d", prompt=2, max_tokens=9)
    assert bench.step() == [("a", 1), ("b", 5), ("c", 4)]  # 10 tokens
    assert bench.step() == [("a", 1), ("b", 1), ("c", 6), ("d", 2)]  # c leaves d what it needs
    assert bench.step() == [("a", 1), ("b", 1), ("d", 1), ("c", 7)]


def test_only_the_last_piece_of_a_prefill_samples() -> None:
    bench = Bench(budget=4)
    bench.add("a", prompt=9)
    plans = []
    for _ in range(3):
        plan = bench.scheduler.plan()
        assert plan is not None
        plans.append(plan)
        bench.scheduler.commit(plan, bench.model.execute(plan))
    pieces = [
        (chunk.start, len(chunk.token_ids), chunk.sampling is not None) for plan in plans for chunk in plan.chunks
    ]
    assert pieces == [(0, 4, False), (4, 4, False), (8, 1, True)]
    assert [plan.number for plan in plans] == [1, 2, 3]


def test_lower_ranks_go_first_and_within_a_rank_who_came_first() -> None:
    bench = Bench(slots=1)
    for name, rank in (("bulk", 2), ("free1", 1), ("paid", 0), ("free2", 1)):
        bench.add(name, rank=rank, max_tokens=1)
    assert [bench.step()[0][0] for _ in range(4)] == ["paid", "free1", "free2", "bulk"]


def test_a_lower_rank_takes_a_slot_in_the_next_step_when_all_are_taken() -> None:
    bench = Bench(slots=2, budget=8)
    bench.add("bulk1", rank=2, max_tokens=50)
    bench.add("bulk2", rank=2, max_tokens=50)
    bench.step()
    bench.add("paid", rank=0, prompt=4, max_tokens=2)
    assert bench.step() == [("bulk1", 1), ("paid", 4)]
    assert bench.scheduler.stats().preemptions == 1
    assert bench.step() == [("bulk1", 1), ("paid", 1)]
    assert bench.step()[1][0] == "bulk2"  # back at once when the slot is free
    bench.run()
    assert bench.scheduler.stats().preemptions == 1


def test_even_a_long_prefill_of_a_higher_rank_does_not_delay_it() -> None:
    bench = Bench(slots=4, budget=8)
    bench.add("bulk", rank=2, prompt=40)
    bench.step()
    bench.add("paid", rank=0, prompt=3)
    assert bench.step() == [("paid", 3), ("bulk", 5)]


def test_the_victim_is_of_the_highest_rank_then_the_cheapest_then_the_newest() -> None:
    bench = Bench(slots=4, budget=64)
    bench.add("free", rank=1, prompt=1, max_tokens=50)
    bench.add("bulk long", rank=2, prompt=9, max_tokens=50)
    bench.add("bulk old", rank=2, prompt=3, max_tokens=50)
    bench.add("bulk new", rank=2, prompt=3, max_tokens=50)
    bench.step()
    for name, victim in (("p1", "bulk new"), ("p2", "bulk old"), ("p3", "bulk long"), ("p4", "free")):
        before = {request_id for request_id, _ in bench.step()}
        bench.add(name, rank=0, max_tokens=50)
        assert before - {request_id for request_id, _ in bench.step()} == {victim}


def test_equal_ranks_never_take_slots_from_each_other() -> None:
    bench = Bench(slots=1)
    bench.add("a", rank=1, max_tokens=9)
    bench.step()
    bench.add("b", rank=1, max_tokens=9)
    bench.add("c", rank=2, max_tokens=9)
    bench.run()
    assert list(bench.ends) == ["a", "b", "c"]
    assert bench.scheduler.stats().preemptions == 0


def test_a_preempted_request_keeps_its_place_before_those_that_never_started() -> None:
    bench = Bench(slots=1)
    bench.add("first", rank=2, max_tokens=9)
    bench.step()
    bench.add("second", rank=2, max_tokens=9)
    bench.add("paid", rank=0, max_tokens=1)
    assert bench.step() == [("paid", 3)]
    assert bench.step() == [("first", 4)]


def test_nobody_is_preempted_for_a_request_that_would_still_not_fit() -> None:
    bench = Bench(slots=4, num_blocks=8, block_size=4)
    bench.add("paid1", rank=0, prompt=20, max_tokens=3)
    bench.add("bulk", rank=1, prompt=3, max_tokens=3)
    bench.step()
    bench.add("paid2", rank=0, prompt=20, max_tokens=3)
    assert [request_id for request_id, _ in bench.step()] == ["paid1", "bulk"]
    bench.run()
    assert list(bench.ends) == ["paid1", "bulk", "paid2"]
    assert bench.scheduler.stats().preemptions == 0


def test_a_slot_is_not_taken_before_the_budget_can_use_it() -> None:
    bench = Bench(slots=4, budget=8)
    for index in range(4):
        bench.add(f"bulk{index}", rank=2, prompt=2, max_tokens=50)
    bench.step()
    for index in range(3):
        bench.add(f"paid{index}", rank=0, prompt=9, max_tokens=50)
    assert bench.step() == [("bulk0", 1), ("bulk1", 1), ("bulk2", 1), ("paid0", 5)]
    assert bench.scheduler.stats().preemptions == 1


def test_out_of_blocks_the_newest_of_the_highest_rank_yields() -> None:
    bench = Bench(slots=3, num_blocks=8, block_size=4)
    # Expected to be short, all three join; then they are not.
    bench.add("paid", rank=0, prompt=4, max_tokens=20, expected_tokens=1)
    bench.add("bulk1", rank=2, prompt=4, max_tokens=20, expected_tokens=1)
    bench.add("bulk2", rank=2, prompt=3, max_tokens=20, expected_tokens=1)
    computed = [bench.step()]
    while not bench.scheduler.stats().preemptions:
        computed.append(bench.step())
    assert {request_id for request_id, _ in computed[-2]} - {request_id for request_id, _ in computed[-1]} == {"bulk2"}
    assert bench.scheduler.stats().preemptions == 1
    bench.run()
    assert all(len(tokens) == 20 for tokens in bench.tokens.values())


def test_who_joins_leaves_a_block_for_each_running_sequence_to_grow() -> None:
    bench = Bench(slots=2, num_blocks=4, block_size=4)
    bench.add("a", prompt=3, max_tokens=4)
    bench.step()
    bench.add("b", prompt=12, max_tokens=1)  # its three blocks are free, but a needs one of them in the step after next
    assert bench.step() == [("a", 1)]
    bench.run()
    assert list(bench.ends) == ["a", "b"]
    assert bench.scheduler.stats().preemptions == 0


def test_with_room_for_one_everybody_gets_through() -> None:
    bench = Bench(slots=4, num_blocks=4, block_size=4, context_length=16)
    for index in range(4):
        bench.add(f"r{index}", prompt=2, max_tokens=14)
    bench.run()
    assert [len(bench.tokens[f"r{index}"]) for index in range(4)] == [14] * 4


def test_a_request_that_fills_context_or_pool_ends_by_length() -> None:
    for bench in (Bench(context_length=12), Bench(num_blocks=3, block_size=4)):
        bench.add("a", prompt=4, max_tokens=50)
        bench.run()
        assert len(bench.tokens["a"]) == 12 - 4
        assert bench.finish_of("a") is Finish.LENGTH


@pytest.mark.parametrize("limits", [{"context_length": 12}, {"num_blocks": 3, "block_size": 4}])
def test_a_prompt_without_room_for_an_answer_is_an_error_with_a_sentence(limits: dict[str, int]) -> None:
    bench = Bench(**limits)
    bench.add("a", prompt=12)
    assert bench.finish_of("a") is Finish.ERROR
    assert bench.ends["a"].error == "The prompt has 12 tokens; a context of 12 has no room to answer it."
    bench.add("b", prompt=0)
    assert bench.ends["b"].error == "The prompt has no tokens."
    assert bench.step() == []


def test_the_end_of_sequence_token_stops_and_is_part_of_the_output() -> None:
    bench = Bench(context_length=1000, num_blocks=1000)
    request = bench.add("a", max_tokens=500, ignore_eos=False)
    bench.run()
    assert (bench.tokens["a"], bench.finish_of("a")) == alone(request, 1000)
    assert bench.tokens["a"][-1] == EOS
    assert bench.finish_of("a") is Finish.STOP


def test_resumed_tokens_are_prefilled_and_count_toward_the_limit() -> None:
    whole = Bench()
    whole.add("a", max_tokens=8)
    whole.run()
    resumed = Bench()
    resumed.add("a", max_tokens=8, resumed_ids=tuple(whole.tokens["a"][:5]))
    assert resumed.step() == [("a", 3 + 5)]
    resumed.run()
    assert resumed.tokens["a"] == whole.tokens["a"][5:]
    stats = resumed.scheduler.stats()
    assert (stats.prompt_tokens, stats.recomputed_tokens, stats.generated_tokens) == (0, 8, 3)


@pytest.mark.parametrize(
    ("max_tokens", "context_length", "resumed_ids", "ignore_eos", "finish"),
    [
        (3, 64, (5, 6, 7), False, Finish.LENGTH),  # all tokens were generated
        (9, 64, (5, EOS), False, Finish.STOP),  # the text had ended
        (2, 64, (5, EOS), False, Finish.STOP),  # both: as it would have ended
        (2, 64, (5, EOS), True, Finish.LENGTH),
        (9, 5, (5, 6), False, Finish.LENGTH),  # 3 + 2 fill the context
    ],
)
def test_a_request_that_earlier_attempts_completed_ends_at_once(
    max_tokens: int, context_length: int, resumed_ids: tuple[int, ...], ignore_eos: bool, finish: Finish
) -> None:
    bench = Bench(context_length=context_length)
    bench.add("a", max_tokens=max_tokens, resumed_ids=resumed_ids, ignore_eos=ignore_eos)
    assert bench.finish_of("a") is finish
    assert bench.tokens["a"] == []
    assert bench.step() == []


def test_abort_frees_everything_in_every_state_and_may_be_repeated() -> None:
    bench = Bench(slots=3, budget=8)
    for name, rank, prompt in (("preempted", 2, 2), ("decoding", 0, 2), ("also decoding", 0, 2)):
        bench.add(name, rank=rank, prompt=prompt, max_tokens=50)
    bench.step()
    bench.add("prefilling", rank=1, prompt=30, max_tokens=50)
    bench.step()
    bench.add("waiting", rank=3, max_tokens=50)
    stats = bench.scheduler.stats()
    assert (stats.preemptions, stats.running, stats.waiting) == (1, 3, 2)
    for name in ("preempted", "decoding", "prefilling", "waiting", "also decoding"):
        assert bench.scheduler.abort(name)
        assert not bench.scheduler.abort(name)
        bench.scheduler.check()
    assert not bench.scheduler.abort("never seen")
    bench.run()
    assert bench.ends == {}


def test_a_request_aborted_while_its_step_is_computed_gets_nothing_from_it() -> None:
    bench = Bench()
    bench.add("a")
    bench.add("b")
    plan = bench.scheduler.plan()
    assert plan is not None
    sampled = bench.model.execute(plan)
    bench.scheduler.abort("a")
    bench.add("a", prompt=5)  # another request by the same name has no part in that step
    assert [progress.request_id for progress in bench.scheduler.commit(plan, sampled)] == ["b"]
    bench.scheduler.check()
    assert bench.step() == [("b", 1), ("a", 5)]


def test_an_id_that_is_live_is_refused() -> None:
    bench = Bench()
    bench.add("a")
    with pytest.raises(ValueError, match="request a is already in the engine"):
        bench.add("a")


def test_a_step_with_a_wrong_number_of_tokens_is_refused() -> None:
    bench = Bench()
    bench.add("a")
    plan = bench.scheduler.plan()
    assert plan is not None
    with pytest.raises(ValueError, match="step 1 returned 2 tokens"):
        bench.scheduler.commit(plan, Sampled([1, 2]))


@pytest.mark.parametrize(("slots", "budget"), [(0, 8), (8, 7)])
def test_limits_that_cannot_work_are_refused_by_name(slots: int, budget: int) -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        Bench(slots=slots, budget=budget)


def test_block_tables_are_consecutive_where_there_is_room() -> None:
    bench = Bench(slots=4, num_blocks=64, block_size=4)
    for index in range(12):
        bench.add(f"r{index}", prompt=2 + index % 5, max_tokens=40)
    while plan := bench.scheduler.plan():
        for chunk in plan.chunks:
            assert chunk.block_ids == tuple(range(chunk.block_ids[0], chunk.block_ids[0] + len(chunk.block_ids)))
        bench.scheduler.commit(plan, bench.model.execute(plan))


def test_counters_tell_first_computations_from_repeated_ones() -> None:
    bench = Bench(slots=1, budget=4)
    bench.add("bulk", rank=2, prompt=6, max_tokens=3)
    bench.step()  # 4 of its 6 prompt tokens
    bench.add("paid", rank=0, prompt=2, max_tokens=1)
    bench.step()
    bench.run()
    assert dataclasses.asdict(bench.scheduler.stats()) == {
        "steps": 6,  # 4 of bulk's prompt | paid | bulk's first 4 again | 2 more, a token | two decodes
        "running": 0,
        "waiting": 0,
        "compiling": 0,
        "slots": 1,
        "blocks_used": 0,
        "blocks_total": 64,
        "prompt_tokens": 8,
        "generated_tokens": 4,
        "recomputed_tokens": 4,
        "cached_tokens": 0,
        "preemptions": 1,
        "slot_steps": 6,
        "running_by_rank": (0, 0, 0),
        "waiting_by_rank": (0, 0, 0),
    }


def test_a_repeated_computation_counts_every_time() -> None:
    bench = Bench(slots=1, budget=4)
    bench.add("bulk", rank=2, prompt=3, max_tokens=9, resumed_ids=(4, 5, 6, 7, 8))
    bench.step()  # 4 of 8, all computed once by an earlier attempt
    bench.add("paid", rank=0, prompt=1, max_tokens=1)
    bench.run()  # paid | all 8 of bulk
    assert bench.scheduler.stats().recomputed_tokens == 4 + 8
    assert bench.scheduler.stats().prompt_tokens == 1


def test_stats_count_sequences_by_rank() -> None:
    bench = Bench(slots=2)
    for name, rank in (("a", 1), ("b", 1), ("c", 1), ("d", 3)):
        bench.add(name, rank=rank)
    bench.step()
    stats = bench.scheduler.stats()
    assert stats.running_by_rank == (0, 2, 0, 0)
    assert stats.waiting_by_rank == (0, 1, 0, 1)


def test_requests_that_come_together_share_a_beginning_that_one_computes() -> None:
    bench = Bench(slots=4, budget=64, prefix_cache=True)
    for name in ("first", "second", "third"):
        bench.add(name, prompt=11, start=0, max_tokens=2, tenant="a")
    bench.add("stranger", prompt=11, start=0, max_tokens=2, tenant="b")
    assert bench.step() == [("first", 11), ("stranger", 11)]  # the others wait for two blocks of four
    assert sorted(bench.step()) == [("first", 1), ("second", 3), ("stranger", 1), ("third", 3)]
    bench.run()
    assert bench.scheduler.stats().cached_tokens == 2 * 8
    assert bench.tokens["first"] == bench.tokens["second"] == bench.tokens["third"] == bench.tokens["stranger"]


def test_a_beginning_that_all_share_takes_its_blocks_once() -> None:
    bench = Bench(slots=8, budget=64, num_blocks=40, prefix_cache=True)
    for number in range(8):
        bench.add(f"r{number}", prompt=41, start=0, max_tokens=7, expected_tokens=7)
    bench.step()
    bench.step()
    # 10 shared blocks, and two more for each: 26 of 40; alone each takes 12.
    assert bench.scheduler.stats().running == 8
    bench.run()
    assert bench.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("seed", range(20))
def test_where_lengths_are_known_the_pool_never_runs_dry_of_what_is_shared(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(slots=8, budget=512, num_blocks=40, block_size=4, prefix_cache=True)
    most = 0
    for number in range(60):
        length = rng.randint(1, 12)
        start = rng.randrange(3)
        bench.add(f"r{number}", prompt=rng.randint(1, 40), start=start, max_tokens=length, expected_tokens=length)
        if rng.random() < 0.5:
            bench.step()
        table = bench.scheduler._batch.table
        most = max(most, sum(int(table.num_blocks[sequence.slot]) for sequence in bench.scheduler.running))
    bench.run()
    assert bench.scheduler.stats().preemptions == 0
    assert most > 40, "the test needs sequences that share"


def test_nobody_waits_for_the_blocks_of_a_lower_tier() -> None:
    bench = Bench(slots=4, budget=8, prefix_cache=True)
    bench.add("bulk", prompt=40, start=0, rank=2)
    bench.step()
    bench.add("paid", prompt=30, start=0, rank=0, max_tokens=1)
    assert "paid" in dict(bench.step())


def test_a_prompt_that_is_cached_to_its_end_costs_a_copy_and_one_token() -> None:
    bench = Bench(prefix_cache=True)
    bench.add("first", prompt=8, start=0, max_tokens=3)
    bench.run()
    bench.add("second", prompt=8, start=0, max_tokens=3)
    plan = bench.scheduler.plan()
    assert plan is not None
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] == [(7, 1)]
    assert len(plan.moves.copies) == 1
    for progress in bench.scheduler.commit(plan, bench.model.execute(plan)):
        bench._note(progress)
    bench.run()
    assert bench.tokens["second"] == bench.tokens["first"]


@pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.AUTO])
def test_a_swapped_sequence_comes_back_without_computing_again(preemption: Preemption) -> None:
    bench = Bench(slots=1, budget=16, preemption=preemption, num_host_blocks=8, swap_block_ms=0.0)
    request = bench.add("bulk", rank=2, prompt=9, max_tokens=6)
    for _ in range(3):
        bench.step()
    bench.add("paid", rank=0, prompt=3, max_tokens=2)
    bench.run()
    stats = bench.scheduler.stats()
    assert (stats.preemptions, stats.recomputed_tokens) == (1, 0)
    assert bench.tokens["bulk"] == alone(request, bench.context_length)[0]


def test_who_has_shown_something_is_not_made_to_start_over() -> None:
    bench = Bench(slots=2, budget=8, preemption=Preemption.DISCARD)
    bench.add("shown", rank=2, prompt=2, max_tokens=9)
    bench.step()
    bench.add("silent", rank=2, prompt=20, max_tokens=9)
    bench.step()
    bench.add("paid", rank=0, prompt=2, max_tokens=3)
    assert {name for name, _ in bench.step()} == {"shown", "paid"}
    bench.add("paid again", rank=0, prompt=2, max_tokens=2)
    assert {name for name, _ in bench.step()} == {"shown", "paid"}  # nobody is left who may start over
    bench.run()


def test_who_starts_over_takes_no_block_from_those_that_share_it() -> None:
    bench = Bench(slots=2, budget=16, preemption=Preemption.DISCARD, prefix_cache=True)
    bench.add("shown", prompt=9, start=0, max_tokens=20)
    bench.step()
    bench.add("silent", prompt=40, start=0, rank=2)
    bench.step()
    bench.add("paid", prompt=12, start=0, max_tokens=2)
    assert bench.step() == [("shown", 1), ("paid", 12 - 8)]
    bench.run()


def test_within_its_quantum_nobody_is_preempted() -> None:
    bench = Bench(slots=1, quantum_steps=3)
    bench.add("bulk", rank=2, max_tokens=9)
    bench.step()
    bench.add("paid", rank=0, max_tokens=1)
    assert [bench.step()[0][0] for _ in range(3)] == ["bulk", "bulk", "paid"]


def test_who_was_preempted_often_keeps_its_slot_until_it_has_grown_by_an_eighth() -> None:
    bench = Bench(slots=1, budget=64, max_preemptions=2)
    bench.add("bulk", prompt=24, rank=2, max_tokens=20)
    lengths = []
    for number in range(1, 6):
        assert bench.step()[0][0] == "bulk"  # it is back
        bench.add("paid" * number, prompt=2, rank=0, max_tokens=1)
        while "paid" * number not in bench.ends:
            bench.step()
        lengths.append(24 + len(bench.tokens["bulk"]))
    assert lengths == [25, 26, 30, 34, 39]
    bench.run()


def test_a_tenant_holds_no_more_slots_than_its_cap() -> None:
    bench = Bench(slots=4, max_tenant_seqs={0: 2})
    for name in ("a1", "a2", "a3"):
        bench.add(name, tenant="a")
    bench.add("b1", tenant="b")
    bench.add("a4", tenant="a", rank=1)
    assert [name for name, _ in bench.step()] == ["a1", "a2", "b1", "a4"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("limits", [{"max_tenant_seqs": {1: 1}}, {"prefix_cache": True}])
def test_those_who_wait_for_a_slot_or_a_prefix_do_not_hold_up_others(policy: str, limits: dict[str, Any]) -> None:
    bench = Bench(slots=4, budget=8, num_blocks=256, policy=policy, **limits)
    for number in range(2 * MAX_PASSED_BY):
        bench.add(f"many{number}", prompt=40, start=0, max_tokens=40, tenant="many", rank=1)
    bench.step()
    for rank in (0, 1):
        bench.add(f"other{rank}", prompt=2, tenant="other" * rank, rank=rank)
    assert {"other0", "other1"} <= {name for _ in range(3) for name, _ in bench.step()}


@pytest.mark.parametrize(
    ("limits", "message"),
    [({"max_waiting": 2}, "2 requests wait already"), ({"max_waiting_tokens": 8}, "6 tokens wait already")],
)
def test_a_full_line_refuses_by_name(limits: dict[str, int], message: str) -> None:
    bench = Bench(**limits)
    bench.add("a")
    bench.add("b")
    refused = bench.scheduler.add(Request("c", (1, 2, 3), Sampling(5)))
    assert refused is not None and refused.finish is Finish.ERROR and message in (refused.error or "")
    bench.run()
    bench.add("d")


class Charged(Tiered):
    """The default policy; notes what each request's tenant was charged for its prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.prefilled = Counter[str]()

    def join(self, request: Request, *, prefilled: int) -> None:
        super().join(request, prefilled=prefilled)
        self.prefilled[request.id] += prefilled


@pytest.mark.parametrize("preemption", Preemption)
def test_a_prompt_that_was_preempted_midway_is_charged_once(preemption: Preemption) -> None:
    policy = Charged()
    limits = Bench(slots=1, budget=8, num_host_blocks=64, preemption=preemption, context_length=200).scheduler._limits
    scheduler = Scheduler(limits, policy=policy)
    scheduler.add(Request("long", tuple(range(100)), Sampling(1, ignore_eos=True), rank=2))
    for number in range(3):
        for _ in range(2):
            plan = scheduler.plan()
            assert plan is not None
            scheduler.commit(plan, Sampled([1] * plan.num_sampling))
        scheduler.add(Request(f"paid{number}", (1, 2), Sampling(1, ignore_eos=True), tenant="other"))
    while plan := scheduler.plan():
        scheduler.commit(plan, Sampled([1] * plan.num_sampling))
    joins = 1 + scheduler.stats().preemptions
    assert joins > 1 and 100 <= policy.prefilled["long"] <= 100 + joins


def test_the_length_of_an_output_that_a_stop_string_ended_is_learned() -> None:
    bench = Bench(num_blocks=16)
    for number in range(40):
        bench.scheduler.add(Request(f"{number}", (1, 2, 3), Sampling(40, ignore_eos=True)))
        for _ in range(3):
            plan = bench.scheduler.plan()
            assert plan is not None
            bench.scheduler.commit(plan, Sampled([1] * plan.num_sampling))
        bench.scheduler.stop(f"{number}")
    bench.scheduler.check()
    assert bench.scheduler.stats().running == 0
    assert bench.scheduler._lengths.expected("", at_least=0, at_most=40) == 3


def test_a_request_ends_at_its_deadline_wherever_it_is() -> None:
    bench = Bench(slots=1)
    bench.add("running", deadline=5.0, max_tokens=50)
    bench.add("waiting", deadline=6.0)
    bench.step()
    assert bench.scheduler.expire(4.9) == []
    assert [(each.request_id, each.finish) for each in bench.scheduler.expire(6.0)] == [
        ("running", Finish.EXPIRED),
        ("waiting", Finish.EXPIRED),
    ]
    bench.run()


def test_a_deadline_is_of_one_arrival_not_of_the_next_by_the_same_name() -> None:
    bench = Bench()
    bench.add("a", deadline=5.0, max_tokens=50)
    bench.scheduler.abort("a")
    bench.add("a", deadline=9.0, max_tokens=50)
    assert bench.scheduler.expire(5.0) == []
    assert [each.request_id for each in bench.scheduler.expire(9.0)] == ["a"]


def test_what_ended_is_not_kept_until_its_deadline() -> None:
    bench = Bench()
    for number in range(300):
        bench.add(f"ended {number}", deadline=86_400.0, max_tokens=1)
        bench.step()
    bench.add("lives", deadline=5.0, max_tokens=50)
    held = [each.request.id for each in gc.get_objects() if type(each) is TokenLine]
    assert not [name for name in held if name.startswith("ended")]
    assert [each.request_id for each in bench.scheduler.expire(5.0)] == ["lives"]


@pytest.mark.parametrize(
    ("prefill", "steps"),
    [
        (Prefill.CHUNKED, [{"a", "b"}, {"a", "b"}]),
        (Prefill.FIRST, [{"b"}, {"b"}]),
        (Prefill.INTERLEAVED, [{"a"}, {"b"}]),  # the step before was one of prompts
    ],
)
def test_prompts_share_the_steps_as_the_operator_chose(prefill: Prefill, steps: list[set[str]]) -> None:
    bench = Bench(budget=8, prefill=prefill)
    bench.add("a", prompt=2, max_tokens=20)
    bench.step()
    bench.add("b", prompt=20, max_tokens=20)
    assert [{name for name, _ in bench.step()} for _ in steps] == steps
    bench.run()


def test_what_is_too_little_for_another_prompt_goes_to_those_in_the_step() -> None:
    cost = StepCost(Coefficients(step=10.0, row=0.0, prefill_token=1.0, prefill_pair=0.0, kv_position=0.0))
    assert cost.planned_ms(37.5) == pytest.approx(30.0)
    bench = Bench(budget=64, slots=8, step_budget_ms=37.5, cost=cost)
    bench.add("runs", prompt=2, max_tokens=40)
    bench.step()
    bench.add("long", prompt=50)
    assert bench.step() == [("runs", 1), ("long", 20)]
    bench.add("short", prompt=8)
    bench.add("later", prompt=50)
    # Half of the time for the one that began, and 2 tokens are less than a block.
    assert bench.step() == [("runs", 1), ("long", 10 + 2), ("short", 8)]
    bench.run()


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, tiers, tenants, resumptions and aborts over tiny pools, under any policy and mode."""

    @initialize(
        slots=st.integers(1, 4),
        spare_budget=st.integers(0, 12),
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        context_length=st.integers(2, 24),
        policy=st.sampled_from(sorted(POLICIES)),
        prefill=st.sampled_from(Prefill),
        preemption=st.sampled_from(Preemption),
        quantum_steps=st.integers(0, 3),
        max_preemptions=st.integers(0, 3),
        num_host_blocks=st.integers(0, 6),
        prefix_cache=st.booleans(),
        step_budget_ms=st.sampled_from([None, 1.0, 25.0]),
        max_tenant_seqs=st.sampled_from([{}, {0: 1}, {0: 2, 1: 1, 2: 2}]),
    )
    def make_bench(
        self, slots: int, spare_budget: int, num_blocks: int, block_size: int, context_length: int, **choices: Any
    ) -> None:
        self.bench = Bench(
            slots=slots,
            budget=slots + spare_budget,
            num_blocks=num_blocks,
            block_size=block_size,
            context_length=context_length,
            swap_block_ms=0.0,  # so that "auto" swaps
            **choices,
        )
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    @rule(
        prompt=st.integers(1, 14),
        max_tokens=st.integers(1, 16),
        rank=st.integers(0, 2),
        num_resumed=st.integers(0, 4),
        ignore_eos=st.booleans(),
        tenant=st.sampled_from(["a", "b"]),
        start=st.integers(0, 1),
        expected_tokens=st.one_of(st.none(), st.integers(1, 16)),
    )
    def add(
        self, prompt: int, max_tokens: int, rank: int, num_resumed: int, ignore_eos: bool, start: int, **fields: Any
    ) -> None:
        request_id = "r" * (len(self.requests) + 1)
        fresh = Request(
            request_id,
            tuple((start + i) % VOCABULARY for i in range(prompt)),
            Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos),
        )
        resumed_ids = tuple(alone(fresh, self.bench.context_length)[0][:num_resumed])
        self.requests[request_id] = self.bench.add(
            request_id,
            prompt=prompt,
            max_tokens=max_tokens,
            rank=rank,
            resumed_ids=resumed_ids,
            ignore_eos=ignore_eos,
            start=start,
            **fields,
        )

    @rule()
    def step(self) -> None:
        before = self.bench.scheduler.stats()
        assert bool(self.bench.step()) == bool(before.running or before.waiting), "a step computes something"

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        is_live = request_id not in self.bench.ends and request_id not in self.aborted
        assert self.bench.scheduler.abort(request_id) == is_live
        if is_live:
            self.aborted.add(request_id)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.run()
        assert self.requests.keys() == self.bench.ends.keys() | self.aborted
        assert not self.bench.ends.keys() & self.aborted
        for request_id, request in self.requests.items():
            tokens = self.bench.tokens[request_id]
            if len(request.prompt_ids) >= self.bench.context_length:
                assert self.bench.finish_of(request_id) is Finish.ERROR
                continue
            expected, finish = alone(request, self.bench.context_length)
            if request_id in self.aborted:
                assert tokens == expected[: len(tokens)]
            else:
                assert (tokens, self.bench.finish_of(request_id)) == (expected, finish)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
