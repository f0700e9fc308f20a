"""What the next step computes: iteration-level scheduling over slots, a token and a time budget, and paged KV blocks.

Pure: no torch, no clock, no I/O. After every step finished sequences leave and waiting ones join:

    plan:    decodes get the block they need → pieces of prompts share the budget, and waiting sequences join for them,
             in the policy's order, taking slots from higher ranks where there are none → arrays
    commit:  tokens are appended → full blocks are published → the policy is told → who is done leaves
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.budget import Budget
from engine.cost import CPU_SMALL, StepCost, Work
from engine.lengths import Lengths, peak_blocks
from engine.limits import Limits, Preemption, Prefill
from engine.memory import Match, Memory
from engine.policies import Policy
from engine.policies.tiered import Tiered
from engine.request import Finish, Request, Sampling, Stats
from engine.sequence import Sequence, State
from engine.step import StepPlan
from engine.table import Table
from engine.waiting import Turn, WaitingLine, Walk

MAX_PASSED_BY = 64
"""Waiting sequences that one plan looks at and leaves where they are: they wait for a prefix, or their cap."""


class QueueFullError(ValueError):
    """So many requests, or tokens, wait already."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step, or nothing but its arrival or the passing of time, did for one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """The tokens it gained."""
    finish: Finish | None = None
    error: str | None = None
    """One sentence, with Finish.ERROR."""


@dataclass(slots=True)
class _Piece:
    """A part of a prompt that the step computes."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.num_tokens

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.start : self.end]

    @property
    def sampling(self) -> Sampling | None:
        return self.sequence.request.sampling if self.is_last else None


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The decoding sequences and what a plan needs of them, made anew when one comes or goes."""

    sequences: tuple[Sequence, ...]
    rows: npt.NDArray[np.int64]
    request_ids: tuple[str, ...]
    samplings: tuple[Sampling, ...]


_NO_DECODES = _Decodes((), np.zeros(0, dtype=np.int64), (), ())


class _Door:
    """Who may join next, in the policy's order, as long as there is room for somebody of its rank."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._closed_from: int | None = None
        self._num_passed = 0

    def next(self) -> Sequence | None:
        while (sequence := self._walk.next()) is not None:
            if self._closed_from is None or sequence.rank < self._closed_from:
                return sequence
            self._walk.leave(sequence)
        return None

    def pass_by(self, sequence: Sequence) -> None:
        """It waits for something of its own: those behind it may go first."""
        self._walk.pass_by(sequence)
        self._num_passed += 1
        if self._num_passed >= MAX_PASSED_BY:
            self.close_to(0)

    def close_to(self, rank: int) -> None:
        """There is no room for this rank: nobody behind it of the same or a higher one may overtake."""
        self._closed_from = rank if self._closed_from is None else min(self._closed_from, rank)


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
        self._policy = policy or Tiered()
        self._cost = cost or StepCost(CPU_SMALL, weight=1.0)
        self._lengths = Lengths()
        self._table = Table(limits.max_num_seqs)
        self._memory = Memory(limits, self._table, secret=secret)
        # What the pool cannot hold is no context: so the last one running always has room to go on.
        self._context_length = min(limits.context_length, limits.num_blocks * limits.block_size)

        self._live: dict[str, Sequence] = {}
        self._waiting = WaitingLine(self._policy)
        self._prefilling: list[Sequence] = []  # in the order in which they joined
        self._decoding: dict[int, Sequence] = {}  # by slot, in the order in which they began to decode
        self._decodes: _Decodes | None = None  # of _decoding, until it changes
        self._running_of: Counter[Hashable] = Counter()  # by queue
        self._slots_of: Counter[str] = Counter()  # by tenant
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap; those that ended stay until their time
        self._planned: tuple[_Decodes, list[_Piece]] | None = None  # decodes and pieces not yet committed
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
        self._running_by_rank: Counter[int] = Counter()

    # What callers ask.

    def add(self, request: Request, now: float = 0.0) -> Progress | None:
        """Take a request. Returns its end where there is nothing to compute, and None where it joined the line.

        Raises ValueError for an id that is live, QueueFullError where too much waits.
        """
        if request.id in self._live:
            raise ValueError(f"request {request.id} is already in the engine")
        if end := self._end_on_arrival(request):
            return end
        self._check_room_to_wait(request)
        sequence = self._sequence_of(request, now)
        self._live[request.id] = sequence
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.number, sequence))
        is_idle = not self._waiting.holds(sequence.queue) and not self._running_of[sequence.queue]
        self._policy.arrive(request, is_idle=is_idle)
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

    def expire(self, now: float) -> list[Progress]:
        """End the requests whose deadline has passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            if sequence.state is not State.ENDED:
                self._end(sequence)
                expired.append(Progress(sequence.request.id, finish=Finish.EXPIRED))
        return expired

    @property
    def steps(self) -> int:
        """Steps committed."""
        return self._steps

    def stats(self) -> Stats:
        waiting = self._waiting.by_rank
        num_ranks = 1 + max((*waiting, *self._running_by_rank), default=-1)
        return Stats(
            steps=self._steps,
            running=self._num_running,
            waiting=len(self._waiting),
            slots=self._limits.max_num_seqs,
            blocks_used=self._memory.num_used,
            blocks_total=self._memory.num_blocks,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            recomputed_tokens=self._recomputed_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=self._preemptions,
            slot_steps=self._slot_steps,
            running_by_rank=tuple(self._running_by_rank[rank] for rank in range(num_ranks)),
            waiting_by_rank=tuple(waiting[rank] for rank in range(num_ranks)),
        )

    def check(self) -> None:
        """Assert that blocks, slots and states agree; for tests."""
        running, waiting = list(self._running()), list(self._waiting)
        self._memory.check(running, waiting)
        assert len(running) <= self._limits.max_num_seqs
        assert len(running) + self._table.num_free == self._limits.max_num_seqs
        assert {sequence.request.id for sequence in [*running, *waiting]} == self._live.keys()
        assert self._running_by_rank == Counter(sequence.request.rank for sequence in running)
        assert self._waiting.by_rank == Counter(sequence.request.rank for sequence in waiting)
        assert self._running_of == Counter(sequence.queue for sequence in running)
        assert self._slots_of == Counter(sequence.request.tenant for sequence in running)
        for sequence in running:
            held = int(self._table.num_blocks[sequence.slot]) * self._limits.block_size
            assert held >= int(self._table.num_computed[sequence.slot])
            assert self._table.num_tokens[sequence.slot] == sequence.num_tokens

    # The plan.

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None where no request is live. Each plan is committed before the next is made.

        now  seconds of the caller's clock
        """
        assert self._planned is None, "the last plan was not committed"
        self._now = now
        self._make_room_for_decodes()
        pieces = self._plan_pieces()
        is_mixed = self._limits.prefill is Prefill.CHUNKED
        decodes = self._decodes_now() if is_mixed or not pieces else _NO_DECODES
        self._was_prefill = bool(pieces)
        if not pieces and not decodes.sequences:
            return None
        self._planned = decodes, pieces
        plan = self._arrays(decodes, pieces)
        self._planned_work = Work.of(plan)
        return plan

    def _make_room_for_decodes(self) -> None:
        """Give each decoding sequence the block its newest token needs; out of blocks, the last in order yields."""
        rows = self._decodes_now().rows
        held = self._table.num_blocks[rows] * self._limits.block_size
        for slot in rows[self._table.num_computed[rows] == held].tolist():
            sequence = self._decoding.get(slot)
            while sequence is not None and sequence.state is State.DECODING:
                if self._memory.grow(sequence, expected_blocks=self._expected_blocks(sequence)):
                    break
                # Never the first in order unless it is alone, and alone it fits: somebody always gets ahead.
                self._preempt(max(self._running(), key=_order))

    def _plan_pieces(self) -> list[_Piece]:
        """Share the step's budget among prompts, those begun and those that join, in order.

        Nobody joins who would get no token in this step: a slot is taken from another only to be used.
        """
        if self._limits.prefill is Prefill.INTERLEAVED and self._was_prefill and self._decoding:
            return []
        budget = Budget(self._limits, self._cost, self._decode_work())
        begun = sorted(self._prefilling, key=self._turn)
        door = _Door(self._waiting.walk(self._now))
        pieces: list[_Piece] = []
        while budget.has_room:
            begun = [sequence for sequence in begun if sequence.state is State.PREFILLING]
            newcomer = door.next()
            is_contested = len(begun) + (newcomer is not None) > 1
            if newcomer and (not begun or self._turn(newcomer) < self._turn(begun[0])):
                piece = self._let_in(newcomer, door, budget, pieces, is_contested=is_contested)
            elif begun:
                piece = self._piece(begun.pop(0), budget, is_contested=is_contested)
                if piece is None:
                    break
            else:
                break
            if piece is not None:
                pieces.append(piece)
        for piece in pieces:  # what the last ones left goes to the first ones
            more = budget.share(piece.end, piece.sequence.num_tokens, is_contested=False) if budget.has_room else 0
            budget.spend(piece.end, more)
            piece.count += more
        return pieces

    def _piece(self, sequence: Sequence, budget: Budget, *, is_contested: bool) -> _Piece | None:
        start = int(self._table.num_computed[sequence.slot])
        count = budget.share(start, sequence.num_tokens, is_contested=is_contested)
        if not count:
            return None
        budget.spend(start, count)
        return _Piece(sequence, start, count)

    def _turn(self, sequence: Sequence) -> Turn:
        return self._waiting.turn(sequence, self._now)

    # Who joins.

    def _let_in(
        self, newcomer: Sequence, door: _Door, budget: Budget, pieces: list[_Piece], *, is_contested: bool
    ) -> _Piece | None:
        """A slot, blocks and a first piece for a waiting sequence, or None: the door then knows why it stays."""
        match = self._memory.match(newcomer)
        if self._must_wait(newcomer, match):
            door.pass_by(newcomer)
            return None
        victims = self._victims_for(newcomer, match, but=pieces)
        if victims is None:
            door.close_to(newcomer.rank)
            return None
        if not budget.share(match.num_tokens, newcomer.num_tokens, is_contested=is_contested):
            door.close_to(0)
            return None
        if victims:
            before = self._decode_work()
            for victim in victims:
                victim.num_preemptions += 1
                self._preempt(victim)
            budget.give_back(before - self._decode_work())
            match = self._memory.match(newcomer)  # what they had published may be gone, or idle now
        self._join(newcomer, match)
        return self._piece(newcomer, budget, is_contested=is_contested)

    def _must_wait(self, newcomer: Sequence, match: Match) -> bool:
        """Whether somebody computes a block that it could share, its tenant has all its slots, or it just yielded."""
        cap, tenant = self._limits.max_tenant_seqs, newcomer.request.tenant
        is_capped = cap is not None and self._slots_of[tenant] >= cap
        has_maker = match.maker is not None and match.maker.rank <= newcomer.rank
        return is_capped or has_maker or newcomer.left_step == self._steps + 1

    def _victims_for(self, newcomer: Sequence, match: Match, *, but: list[_Piece]) -> list[Sequence] | None:
        """Who must yield for a waiting sequence: nobody (empty), the cheapest of high ranks, or it stays (None)."""
        if self._has_room(newcomer, match, without=()):
            return []
        planned = {piece.sequence.number for piece in but}
        candidates = [
            other for other in self._running() if other.number not in planned and self._may_yield(other, newcomer.rank)
        ]
        candidates.sort(key=lambda other: (-other.rank, other.num_tokens, -other.number))
        # The more yield, the more room there is.
        count = bisect.bisect_left(
            range(len(candidates) + 1),
            True,
            key=lambda count: self._has_room(newcomer, match, without=candidates[:count]),
        )
        return candidates[:count] if count <= len(candidates) else None

    def _may_yield(self, other: Sequence, rank: int) -> bool:
        """Whether a running sequence may be preempted for one of this rank.

        Strictly higher ranks only: among equals two would take the slot from each other for ever.
        """
        return (
            other.rank > rank
            and other.num_preemptions < self._limits.max_preemptions
            and self._steps + 1 - other.joined_step >= self._limits.quantum_steps
            and not (self._limits.preemption is Preemption.DISCARD and other.has_shown)
            and self._policy.may_yield(other.rank)
        )

    def _has_room(self, newcomer: Sequence, match: Match, *, without: Items[Sequence]) -> bool:
        """Whether there is a slot, blocks for all its tokens, and memory for what all are expected to become.

        without  running sequences that would yield
        """
        slots = [other.slot for other in without]
        if not self._table.num_free + len(slots):
            return False
        if match.num_needed > self._memory.num_free + sum(self._memory.num_own(other) for other in without):
            return False
        rows = np.array([other.slot for other in self._running() if other.slot not in slots], dtype=np.int64)
        if not len(rows):
            return True  # alone it fits
        now, ends = self._table.num_tokens[rows], self._expected_ends(rows)
        tokens = np.append(now, newcomer.num_tokens)
        remaining = np.append(np.maximum(ends - now, 1), self._expected_end(newcomer) - newcomer.num_tokens)
        return peak_blocks(tokens, remaining, self._limits.block_size) <= self._memory.num_blocks

    def _expected_ends(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """[rows] Tokens at which running sequences are expected to end; whoever outran it is looked at again."""
        if (self._table.num_tokens[rows] >= self._table.ends[rows]).any():
            for other in self._running():
                if other.num_tokens >= self._table.ends[other.slot]:
                    self._table.ends[other.slot] = self._expected_end(other)
        return self._table.ends[rows]

    def _expected_end(self, sequence: Sequence) -> int:
        """Tokens, prompt included, at which the sequence is expected to end; more than it has."""
        request = sequence.request
        most = sequence.token_limit - len(request.prompt_ids)
        expected = request.expected_tokens
        if expected is None or expected <= sequence.num_generated:
            expected = self._lengths.expected(request.kind, at_least=sequence.num_generated, at_most=most)
        return len(request.prompt_ids) + max(min(expected, most), sequence.num_generated + 1)

    def _join(self, sequence: Sequence, match: Match) -> None:
        self._waiting.leave(sequence, self._now)
        slot = sequence.slot = self._table.take()
        self._table.num_tokens[slot] = sequence.num_tokens
        self._table.last_ids[slot] = sequence.token_ids[-1]
        self._table.ends[slot] = self._expected_end(sequence)
        if not sequence.host_ids:
            self._cached_tokens += match.num_tokens
        self._memory.join(sequence, match, expected_blocks=self._expected_blocks(sequence))
        sequence.state = State.PREFILLING
        sequence.joined_step = self._steps + 1
        self._prefilling.append(sequence)
        self._count_running(sequence, 1)
        fresh = max(0, len(sequence.request.prompt_ids) - max(match.num_tokens, sequence.num_seen))
        self._policy.charge(sequence.request, now=self._now, prefilled=max(fresh, 1))

    def _expected_blocks(self, sequence: Sequence) -> int:
        """Blocks that the sequence may still take, for the pool to leave room behind it.

        Its last token is never computed. No more than a slot's share of the pool: most end before their limit, and
        room that is left behind one is missing to another.
        """
        held = int(self._table.num_blocks[sequence.slot])
        return min(
            self._limits.blocks_for(sequence.token_limit - 1) - held,
            self._memory.num_blocks // self._limits.max_num_seqs,
        )

    # Who yields.

    def _preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back to its place in the waiting line; its blocks are free, its tokens kept."""
        num_computed = int(self._table.num_computed[sequence.slot])
        is_swapped = self._is_swap_cheaper(num_computed) and self._memory.swap_out(sequence)
        if not is_swapped:
            sequence.num_seen = max(sequence.num_seen, num_computed)
        is_discarded = self._limits.preemption is Preemption.DISCARD and not sequence.has_shown
        self._leave_batch(sequence, is_forgotten=is_discarded)
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

    def _leave_batch(self, sequence: Sequence, *, is_forgotten: bool = False) -> None:
        if sequence.state is State.DECODING:
            del self._decoding[sequence.slot]
            self._decodes = None
        else:
            self._prefilling.remove(sequence)
        self._memory.release(sequence, is_forgotten=is_forgotten)
        self._table.give_back(sequence.slot)
        sequence.slot = -1
        self._count_running(sequence, -1)

    def _end(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            self._memory.release_host(sequence)
        else:
            self._leave_batch(sequence)
        sequence.state = State.ENDED
        del self._live[sequence.request.id]

    # The plan's arrays.

    def _decodes_now(self) -> _Decodes:
        if self._decodes is None:
            sequences = tuple(self._decoding.values())
            self._decodes = _Decodes(
                sequences,
                rows=np.fromiter(self._decoding, dtype=np.int64, count=len(sequences)),
                request_ids=tuple(sequence.request.id for sequence in sequences),
                samplings=tuple(sequence.request.sampling for sequence in sequences),
            )
        return self._decodes

    def _decode_work(self) -> Work:
        """What the step computes besides prompts."""
        if self._limits.prefill is not Prefill.CHUNKED:
            return Work()
        rows = self._decodes_now().rows
        return Work(rows=len(rows), kv_read=int(self._table.num_tokens[rows].sum()))

    def _arrays(self, decodes: _Decodes, pieces: list[_Piece]) -> StepPlan:
        slots = np.array([piece.sequence.slot for piece in pieces], dtype=np.int64)
        rows = np.concatenate([decodes.rows, slots])
        tokens = [np.array(piece.token_ids, dtype=np.int32) for piece in pieces]
        counts = np.ones(len(rows), dtype=np.int32)
        counts[len(decodes.rows) :] = [piece.count for piece in pieces]
        return StepPlan(
            number=self._steps + 1,
            block_size=self._limits.block_size,
            num_decodes=len(decodes.rows),
            request_ids=decodes.request_ids + tuple(piece.sequence.request.id for piece in pieces),
            samplings=decodes.samplings + tuple(piece.sampling for piece in pieces),
            starts=self._table.num_computed[rows],
            counts=counts,
            token_ids=np.concatenate([self._table.last_ids[decodes.rows], *tokens]),
            tables=self._table.tables(rows),
            moves=self._memory.take_moves(),
        )

    # The results.

    def commit(self, plan: StepPlan, sampled_ids: Items[int], *, elapsed_ms: float | None = None) -> list[Progress]:
        """Book a computed step: one Progress for each request that gained a token, in the plan's order.

        sampled_ids  one for each chunk that samples, in the plan's order; those of aborted requests are dropped
        elapsed_ms   how long the step took, for the cost model to learn from
        Raises ValueError where their number is wrong.
        """
        if len(sampled_ids) != plan.num_sampling:
            raise ValueError(f"step {plan.number} returned {len(sampled_ids)} tokens, not one for each sampling chunk")
        assert self._planned is not None, "nothing was planned"
        (decodes, pieces), self._planned = self._planned, None
        if elapsed_ms is not None:
            self._cost.observe(self._planned_work, elapsed_ms)
        self._memory.settle()
        self._steps += 1
        self._slot_steps += len(plan)
        num_decodes = len(decodes.sequences)
        gained = self._commit_decodes(decodes, sampled_ids[:num_decodes])
        tokens = iter(sampled_ids[num_decodes:])
        for piece in pieces:
            token_id = next(tokens) if piece.is_last else None
            if piece.sequence.state is not State.ENDED:
                self._commit_piece(piece, token_id)
                if token_id is not None:
                    gained.append((piece.sequence, token_id))
        self._charge(gained)
        return [self._append(sequence, token_id) for sequence, token_id in gained]

    def _commit_decodes(self, decodes: _Decodes, sampled_ids: Items[int]) -> list[tuple[Sequence, int]]:
        """Who gained which token; those that were aborted meanwhile did not."""
        table = self._table
        rows, ids = decodes.rows, np.asarray(sampled_ids, dtype=np.int32)
        gained = [
            (sequence, token_id)
            for sequence, token_id in zip(decodes.sequences, sampled_ids, strict=True)
            if sequence.state is not State.ENDED
        ]
        if len(gained) < len(rows):
            is_live = np.array([sequence.state is not State.ENDED for sequence in decodes.sequences], dtype=bool)
            rows, ids = rows[is_live], ids[is_live]
        table.num_computed[rows] += 1
        for slot in rows[table.num_computed[rows] % self._limits.block_size == 0].tolist():
            self._memory.publish(self._decoding[slot], int(table.num_computed[slot]) - 1)
        table.num_tokens[rows] += 1
        table.last_ids[rows] = ids
        return gained

    def _commit_piece(self, piece: _Piece, token_id: int | None) -> None:
        sequence, slot = piece.sequence, piece.sequence.slot
        num_prompt = len(sequence.request.prompt_ids)
        self._recomputed_tokens += max(0, min(piece.end, sequence.num_seen) - piece.start)
        self._prompt_tokens += max(0, min(piece.end, num_prompt) - max(piece.start, sequence.num_seen))
        self._table.num_computed[slot] = piece.end
        self._memory.publish(sequence, piece.start)
        if token_id is not None:
            self._prefilling.remove(sequence)
            self._decoding[slot] = sequence
            self._decodes = None
            sequence.state = State.DECODING
            self._table.num_tokens[slot] += 1
            self._table.last_ids[slot] = token_id

    def _charge(self, gained: Items[tuple[Sequence, int]]) -> None:
        """Tell the policy what was generated, once for each queue."""
        requests = {sequence.queue: sequence.request for sequence, _ in gained}
        for queue, count in Counter(sequence.queue for sequence, _ in gained).items():
            self._policy.charge(requests[queue], now=self._now, generated=count)

    def _append(self, sequence: Sequence, token_id: int) -> Progress:
        """Book a token of a sequence that decodes."""
        sequence.token_ids.append(token_id)
        self._generated_tokens += 1
        is_full = len(sequence.token_ids) >= sequence.token_limit
        finish = self._finish_of(sequence.request.sampling, token_id, is_full=is_full)
        if finish:
            self._lengths.observe(sequence.request.kind, sequence.num_generated)
            self._end(sequence)
        return Progress(sequence.request.id, (token_id,), finish)

    def _finish_of(self, sampling: Sampling, last_id: int, *, is_full: bool) -> Finish | None:
        if last_id in self._limits.eos_ids and not sampling.ignore_eos:
            return Finish.STOP
        return Finish.LENGTH if is_full else None

    # Arrivals.

    def _end_on_arrival(self, request: Request) -> Progress | None:
        """The end of a request that cannot be computed, or that earlier attempts completed."""
        num_prompt, resumed = len(request.prompt_ids), request.resumed_ids
        if not num_prompt:
            return Progress(request.id, finish=Finish.ERROR, error="The prompt has no tokens.")
        if num_prompt >= self._context_length:
            error = f"The prompt has {num_prompt} tokens; a context of {self._context_length} has no room to answer it."
            return Progress(request.id, finish=Finish.ERROR, error=error)
        is_full = len(resumed) >= request.sampling.max_tokens or num_prompt + len(resumed) >= self._context_length
        finish = self._finish_of(request.sampling, resumed[-1], is_full=is_full) if resumed else None
        return Progress(request.id, finish=finish) if finish else None

    def _check_room_to_wait(self, request: Request) -> None:
        count, most = len(self._waiting), self._limits.max_waiting
        if most is not None and count >= most:
            raise QueueFullError(f"{count} requests wait already; max_waiting is {most}")
        tokens, most = self._waiting.num_tokens, self._limits.max_waiting_tokens
        if most is not None and count and tokens + len(request.prompt_ids) > most:
            raise QueueFullError(f"{tokens} tokens wait already; max_waiting_tokens is {most}")

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
        )

    # Who runs.

    @property
    def _num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    def _running(self) -> Iterator[Sequence]:
        yield from self._decoding.values()
        yield from self._prefilling

    def _count_running(self, sequence: Sequence, change: int) -> None:
        self._running_by_rank[sequence.request.rank] += change
        self._running_of[sequence.queue] += change
        self._slots_of[sequence.request.tenant] += change


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
