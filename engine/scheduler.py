"""What the next step computes: iteration-level scheduling over slots, a token and a time budget, and paged KV blocks.

Pure: no torch, no clock, no I/O. After every step finished sequences leave and waiting ones join:

    plan:    decodes get the block they need → pieces of prompts share the budget, and waiting sequences join for them,
             in the policy's order, taking slots from higher ranks where there are none → arrays
    commit:  tokens are appended → full blocks are published → the policy is told → who is done leaves
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from typing import TypeVar

from engine.admission import Admission
from engine.budget import Budget
from engine.cost import CPU_SMALL, StepCost, Work
from engine.lengths import Lengths
from engine.limits import Limits, Preemption, Prefill
from engine.policies import Policy
from engine.policies.tiered import Tiered
from engine.refusals import problem_of
from engine.request import Finish, Request, Stats, TokenLogprob
from engine.running import NO_DECODES, Decodes, Piece, RunningBatch
from engine.sequence import Sequence, State
from engine.step import Progress, Sampled, StepPlan
from engine.waiting import Turn, WaitingLine, Walk

_SPARE_DEADLINES = 64
"""Deadlines of requests that ended, beyond one for each that lives, that are always tolerated."""

_T = TypeVar("_T")


class Scheduler:
    """Plans steps and books their results: `plan`, compute, `commit`, again."""

    def __init__(
        self,
        limits: Limits,
        *,
        policy: Policy | None = None,
        cost: StepCost | None = None,
        secret: bytes = b"everbatch",
    ) -> None:
        """secret keys the names of cached blocks: nobody who does not know it can make two prompts collide."""
        self._limits = limits
        self._is_mixed = limits.prefill is Prefill.CHUNKED  # whether steps with prompts decode too
        self._policy = policy or Tiered()
        self._cost = cost or StepCost(CPU_SMALL)
        self._lengths = Lengths()
        # What the pool cannot hold is no context: so the last one running always has room to go on.
        self._context_length = min(limits.context_length, limits.num_blocks * limits.block_size)

        self._live: dict[str, Sequence] = {}
        self._waiting = WaitingLine(self._policy, limits)
        self._batch = RunningBatch(limits, secret=secret)
        self._admission = Admission(limits, self._batch, self._policy, self._lengths)
        self._deadlines: list[tuple[float, int, str]] = []  # a heap of (deadline, number, id), of some that ended too
        self._planned: tuple[Decodes, list[Piece]] | None = None  # not yet committed
        self._planned_work = Work()
        self._was_prefill = False  # whether the last step computed prompts
        self._now = 0.0
        self._arrivals = 0

        self._steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._recomputed_tokens = 0
        self._cached_tokens = 0
        self._preemptions = 0
        self._slot_steps = 0

    @property
    def steps(self) -> int:
        """Steps committed."""
        return self._steps

    @property
    def running(self) -> Iterator[Sequence]:
        """Who has a slot; to look at."""
        return iter(self._batch)

    def stats(self) -> Stats:
        running, waiting = self._batch.by_rank, self._waiting.by_rank
        ranks = range(1 + max((*waiting, *running), default=-1))
        return Stats(
            steps=self._steps,
            running=len(self._batch),
            waiting=len(self._waiting),
            slots=self._limits.max_num_seqs,
            blocks_used=self._batch.memory.num_used,
            blocks_total=self._batch.memory.num_blocks,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            recomputed_tokens=self._recomputed_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=self._preemptions,
            slot_steps=self._slot_steps,
            running_by_rank=tuple(running[rank] for rank in ranks),
            waiting_by_rank=tuple(waiting[rank] for rank in ranks),
        )

    def check(self) -> None:
        """Assert that blocks, slots and states agree; for tests, between steps."""
        waiting = list(self._waiting)
        self._batch.check(waiting)
        assert {sequence.request.id for sequence in [*self._batch, *waiting]} == self._live.keys()
        assert self._waiting.by_rank == Counter(sequence.request.rank for sequence in waiting)

    # Requests come, and may be taken back.

    def add(self, request: Request, now: float = 0.0) -> Progress | None:
        """Take a request. Returns its end where there is nothing to compute, and None where it joined the line.

        Raises ValueError for an id that is live.
        """
        if request.id in self._live:
            raise ValueError(f"request {request.id} is already in the engine")
        error = problem_of(request, context_length=self._context_length, vocab_size=self._limits.vocab_size)
        if error:
            return Progress(request.id, finish=Finish.ERROR, error=error)
        sequence = self._sequence_of(request, now)
        if request.resumed_ids and (finish := sequence.finish()):
            return Progress(request.id, finish=finish)  # earlier attempts had completed it
        if error := self._waiting.problem_of(len(request.prompt_ids)):
            return Progress(request.id, finish=Finish.ERROR, error=error)
        self._live[request.id] = sequence
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.number, request.id))
        self._policy.arrive(request, is_idle=self._is_idle(sequence))
        self._waiting.add(sequence)
        return None

    def abort(self, request_id: str) -> bool:
        """Drop a request in whatever state it is and free its blocks; False where it is not live.

        No result comes for it any more, not even from a step that is being computed.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def stop(self, request_id: str) -> None:
        """End a request whose text has reached a stop string: as an abort, but its length is one to learn from."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._lengths.observe(sequence.request.kind, sequence.num_generated)
            self._end(sequence)

    def expire(self, now: float) -> list[Progress]:
        """End the requests whose deadline has passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, request_id = heapq.heappop(self._deadlines)
            if self._is_live(request_id, number):
                self._end(self._live[request_id])
                expired.append(Progress(request_id, finish=Finish.EXPIRED))
        return expired

    def _is_live(self, request_id: str, number: int) -> bool:
        """Whether the request of this arrival lives; another one may have come by the same name."""
        sequence = self._live.get(request_id)
        return sequence is not None and sequence.number == number

    def _forget_deadlines(self) -> None:
        """Drop those of requests that ended: most end long before, and the heap would grow until then."""
        self._deadlines = [entry for entry in self._deadlines if self._is_live(entry[2], entry[1])]
        heapq.heapify(self._deadlines)

    def _sequence_of(self, request: Request, now: float) -> Sequence:
        self._arrivals += 1
        expected = request.expected_tokens
        if expected is None:
            expected = self._lengths.expected(request.kind, at_least=0, at_most=request.sampling.max_tokens)
        return Sequence(
            request,
            number=self._arrivals,
            rank=self._policy.rank(request),
            queue=self._policy.queue(request),
            place=self._policy.place(request, arrived_s=now, expected_tokens=expected),
            arrived_s=now,
            token_limit=min(len(request.prompt_ids) + request.sampling.max_tokens, self._context_length),
            end_ids=request.sampling.end_ids(self._limits.eos_ids),
        )

    def _is_idle(self, sequence: Sequence) -> bool:
        """Whether nobody of its queue waits or runs."""
        return not self._waiting.holds(sequence.queue) and not self._batch.by_queue[sequence.queue]

    # The plan.

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None where no request is live. Each plan is committed before the next is made.

        now  seconds of the caller's clock
        """
        assert self._planned is None, "the last plan was not committed"
        self._now = now
        self._make_room_for_decodes()
        pieces = self._plan_pieces()
        decodes = self._batch.decodes if self._is_mixed or not pieces else NO_DECODES
        self._was_prefill = bool(pieces)
        if not pieces and not decodes.sequences:
            return None
        self._planned = decodes, pieces
        plan = self._batch.plan(self._steps + 1, decodes, pieces)
        self._planned_work = Work.of(plan)
        return plan

    def _make_room_for_decodes(self) -> None:
        """Give each decoding sequence the block its newest token needs; out of blocks, the last in order yields."""
        for sequence in self._batch.out_of_room():
            while sequence.state is State.DECODING and not self._batch.grow(sequence):
                # Never the first in order unless it is alone, and alone it fits: somebody always gets ahead.
                self._preempt(max(self._batch, key=lambda other: other.order))

    def _plan_pieces(self) -> list[Piece]:
        """Share the step's budget among prompts, those begun and those that join, in order.

        Nobody joins who would get no token in this step: a slot is taken from another only to be used.
        """
        if self._limits.prefill is Prefill.INTERLEAVED and self._was_prefill and self._batch.decodes.sequences:
            return []
        budget = Budget(self._limits, self._cost, self._batch.decode_work if self._is_mixed else Work())
        begun = sorted(self._batch.prefilling, key=self._turn)
        walk = self._waiting.walk(self._now)
        pieces: list[Piece] = []
        while budget.has_room:
            begun = [sequence for sequence in begun if sequence.state is State.PREFILLING]
            newcomer = walk.next()
            is_contested = len(begun) + (newcomer is not None) > 1
            if newcomer and (not begun or self._turn(newcomer) < self._turn(begun[0])):
                piece = self._let_in(newcomer, walk, budget, pieces, is_contested=is_contested)
            elif begun:
                piece = self._piece(begun.pop(0), budget, is_contested=is_contested)
                if piece is None:
                    break
            else:
                break
            if piece is not None:
                pieces.append(piece)
        for piece in pieces:  # what the last ones left goes to the first ones
            more = budget.rest(piece.end, piece.sequence.num_tokens)
            budget.spend(piece.end, more)
            piece.count += more
        return pieces

    def _let_in(
        self, newcomer: Sequence, walk: Walk, budget: Budget, pieces: list[Piece], *, is_contested: bool
    ) -> Piece | None:
        """A slot, blocks and a first piece for a waiting sequence, or None: the walk then knows why it stays."""
        if self._admission.is_capped(newcomer):
            walk.leave_out(newcomer)
            return None
        match, step = self._batch.memory.match(newcomer), self._steps + 1
        if self._admission.must_wait(newcomer, match, step=step):
            walk.pass_by(newcomer)
            return None
        spared = {piece.sequence.number for piece in pieces}
        victims = self._admission.victims_for(newcomer, match, step=step, spared=spared)
        if victims is None:
            walk.close_to(newcomer.rank)
            return None
        if not budget.share(match.num_tokens, newcomer.num_tokens, is_contested=is_contested):
            walk.close_to(0)
            return None
        if victims:
            self._take_slots(victims, budget)
            match = self._batch.memory.match(newcomer)  # what they had published may be gone, or idle now
            if match.num_needed > self._batch.memory.num_free:  # so much of it was gone
                walk.close_to(newcomer.rank)
                return None
        self._waiting.leave(newcomer, self._now)
        if not newcomer.host_ids:
            self._cached_tokens += match.num_tokens
        self._batch.join(newcomer, match, expected_end=self._admission.expected_end(newcomer), step=step)
        fresh = len(newcomer.request.prompt_ids) - max(match.num_tokens, newcomer.num_charged)
        self._policy.join(newcomer.request, prefilled=max(fresh, 1))
        newcomer.num_charged = len(newcomer.request.prompt_ids)
        return self._piece(newcomer, budget, is_contested=is_contested)

    def _piece(self, sequence: Sequence, budget: Budget, *, is_contested: bool) -> Piece | None:
        start = int(self._batch.table.num_computed[sequence.slot])
        count = budget.share(start, sequence.num_tokens, is_contested=is_contested)
        if not count:
            return None
        budget.spend(start, count)
        return Piece(sequence, start, count)

    def _turn(self, sequence: Sequence) -> Turn:
        return self._waiting.turn(sequence, self._now)

    # Who yields, and who leaves.

    def _take_slots(self, victims: Items[Sequence], budget: Budget) -> None:
        """Preempt for a higher tier."""
        for victim in victims:
            if self._is_mixed and victim.state is State.DECODING:
                budget.give_back(Work(num_decodes=1, kv_read=victim.num_tokens))
            victim.num_preemptions += 1
            self._preempt(victim)

    def _preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back to its place in the waiting line; its blocks are free, its tokens kept."""
        num_computed = int(self._batch.table.num_computed[sequence.slot])
        is_swapped = self._is_swap_cheaper(num_computed) and self._batch.memory.swap_out(sequence)
        if not is_swapped:
            sequence.num_seen = max(sequence.num_seen, num_computed)
        is_discarded = self._limits.preemption is Preemption.DISCARD and not sequence.has_shown
        self._batch.leave(sequence, is_forgotten=is_discarded)
        sequence.state = State.WAITING
        sequence.left_step = self._steps + 1
        self._waiting.add(sequence)
        self._preemptions += 1

    def _is_swap_cheaper(self, num_computed: int) -> bool:
        match self._limits.preemption:
            case Preemption.SWAP:
                return num_computed > 0
            case Preemption.AUTO:
                swap_ms = 2 * self._limits.swap_block_ms * self._limits.blocks_for(num_computed)
                again_ms = self._cost.predict(Work.piece(0, num_computed)) - self._cost.predict(Work())
                return num_computed > 0 and swap_ms < again_ms
        return False

    def _end(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            self._batch.memory.release_host(sequence)
        else:
            self._batch.leave(sequence)
        sequence.state = State.ENDED
        del self._live[sequence.request.id]
        if len(self._deadlines) > 2 * len(self._live) + _SPARE_DEADLINES:
            self._forget_deadlines()
        if self._is_idle(sequence):
            self._waiting.forget(sequence.queue)
            self._policy.depart(sequence.request)

    # The results.

    def commit(self, plan: StepPlan, sampled: Sampled, *, elapsed_ms: float | None = None) -> list[Progress]:
        """Book a computed step: one Progress for each request that sampled, in the plan's order.

        sampled     what came behind each chunk that samples; of aborted requests it is dropped
        elapsed_ms  how long the step took, for the cost model to learn from
        Raises ValueError where the number of tokens is wrong.
        """
        sampled_ids = sampled.token_ids
        if len(sampled_ids) != plan.num_sampling:
            raise ValueError(f"step {plan.number} returned {len(sampled_ids)} tokens, not one for each sampling chunk")
        assert self._planned is not None, "nothing was planned"
        (decodes, pieces), self._planned = self._planned, None
        if elapsed_ms is not None:
            self._cost.observe(self._planned_work, elapsed_ms)
        self._batch.memory.settle()
        self._steps += 1
        self._slot_steps += len(plan)
        num_decodes = len(decodes.sequences)
        decoded = self._batch.commit_decodes(decodes, sampled_ids[:num_decodes])
        begun = self._commit_pieces(pieces, sampled_ids[num_decodes:])
        self._tell_policy([sequence for sequence, _ in decoded], pieces)
        return self._append(decoded + begun, _by_request(plan, sampled.logprobs), _by_request(plan, sampled.errors))

    def _commit_pieces(self, pieces: Items[Piece], sampled_ids: Items[int]) -> list[tuple[Sequence, int]]:
        """Who gained which token; those that were aborted meanwhile did not."""
        tokens, gained = iter(sampled_ids), []
        for piece in pieces:
            token_id = next(tokens) if piece.is_last else None
            sequence = piece.sequence
            if sequence.state is State.ENDED:
                continue
            num_prompt = len(sequence.request.prompt_ids)
            self._recomputed_tokens += max(0, min(piece.end, sequence.num_seen) - piece.start)
            self._prompt_tokens += max(0, min(piece.end, num_prompt) - max(piece.start, sequence.num_seen))
            self._batch.commit_piece(piece, token_id)
            if token_id is not None:
                gained.append((sequence, token_id))
        return gained

    def _tell_policy(self, decoded: Items[Sequence], pieces: Items[Piece]) -> None:
        """What each queue was served by the step: a token computed and one generated for each that decoded."""
        queues = [sequence.queue for sequence in decoded]
        one_of = dict(zip(queues, decoded, strict=True))
        computed = Counter(queues)
        generated = computed.copy()
        for piece in pieces:
            sequence = piece.sequence
            if sequence.state is State.ENDED:
                continue
            one_of[sequence.queue] = sequence
            computed[sequence.queue] += piece.count
            generated[sequence.queue] += piece.is_last
        for queue, count in computed.items():
            self._policy.serve(one_of[queue].request, now=self._now, computed=count, generated=generated[queue])

    def _append(
        self, gained: Items[tuple[Sequence, int]], logprobs: Mapping[str, TokenLogprob], errors: Mapping[str, str]
    ) -> list[Progress]:
        """Book tokens of sequences that decode. A thousand of them are seen at every step: few are called upon.

        logprobs, errors  by request, of some
        """
        self._generated_tokens += len(gained) - len(errors)
        booked = list[Progress]()
        for sequence, token_id in gained:
            request_id = sequence.request.id
            if request_id in errors:
                self._end(sequence)
                booked.append(Progress(request_id, finish=Finish.ERROR, error=errors[request_id]))
                continue
            sequence.append(token_id)
            may_end = token_id in sequence.end_ids or len(sequence.token_ids) >= sequence.token_limit
            finish = self._finish(sequence) if may_end else None
            logprob = (logprobs[request_id],) if request_id in logprobs else ()
            booked.append(Progress(request_id, (token_id,), finish, logprobs=logprob))
        return booked

    def _finish(self, sequence: Sequence) -> Finish | None:
        """End a sequence, if its newest token is its last."""
        finish = sequence.finish()
        if finish:
            self._lengths.observe(sequence.request.kind, sequence.num_generated)
            self._end(sequence)
        return finish


def _by_request(plan: StepPlan, by_place: Mapping[int, _T]) -> dict[str, _T]:
    """What a step has sampled, by request in place of the place among the chunks that sample."""
    if not by_place:
        return {}
    chunks = plan.sampling_chunks
    return {plan.request_ids[chunks[place]]: value for place, value in by_place.items()}
