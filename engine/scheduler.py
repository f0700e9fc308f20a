"""What the next step computes: iteration-level scheduling over slots, a token budget and paged KV blocks.

Pure: no torch, no clock, no I/O. After every step finished sequences leave and waiting ones join. The one order is
(rank, arrival): the lower tier rank goes first, within it whoever came first, and a preempted request keeps its place.

            add                 admitted              last prompt token computed
    ──────────────▶ WAITING ──────────────▶ PREFILLING ──────────────▶ DECODING
                       ▲                         │                        │
                       └─────────────────────────┴── preempted ───────────┘
    any state ── finish, abort ──▶ ENDED
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter

from engine.blocks import BlockPool
from engine.request import Finish, Request, Sampling, Stats
from engine.step import Chunk, StepPlan, pack

_ORDER = attrgetter("order")


class _State(Enum):
    WAITING = auto()
    """Holds no blocks; all its tokens are to be computed."""
    PREFILLING = auto()
    """Has a slot and blocks for all its tokens, some of which are not computed yet."""
    DECODING = auto()
    """Has a slot; all its tokens but the newest are computed."""
    ENDED = auto()
    """Holds nothing."""


@dataclass(slots=True, eq=False)
class _Line:
    """A request's token line: a sequence."""

    request: Request
    order: tuple[int, int]
    """(rank, arrival): unique, smaller goes first, never changes."""
    token_limit: int
    """Tokens at which the line is full, the prompt included."""
    token_ids: list[int] = field(init=False)
    """Prompt, resumed tokens and generated tokens."""
    sampling: Sampling = field(init=False)
    state: _State = _State.WAITING
    block_ids: tuple[int, ...] = ()
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    num_computed_before: int = field(init=False)
    """Tokens that were in a cache once: computing them again is a recomputation."""

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_ids, *self.request.resumed_ids]
        self.sampling = self.request.sampling
        self.num_computed_before = len(self.token_ids) if self.request.resumed_ids else 0

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step, or nothing but its arrival, did for one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """The tokens it gained."""
    finish: Finish | None = None
    error: str | None = None
    """One sentence, with Finish.ERROR."""


class Scheduler:
    """Plans steps and books their results: `plan`, compute, `commit`, again."""

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        context_length: int,
        eos_ids: frozenset[int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        """Raises ValueError where a step could not hold one token for each slot."""
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}; there is at least one slot")
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}; a step holds a token for each of the "
                f"max_num_seqs = {max_num_seqs} slots"
            )
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        # What the pool cannot hold is no context: so the last one running always has room to go on.
        self._context_length = min(context_length, num_blocks * block_size)
        self._eos_ids = eos_ids
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

        self._live: dict[str, _Line] = {}
        self._waiting: list[_Line] = []  # sorted by order
        self._prefilling: list[_Line] = []  # sorted by order
        self._decoding: dict[str, _Line] = {}  # in the order in which they began to decode
        self._planned: list[_Line] = []  # the lines of the plan that is not yet committed, in its order
        self._arrivals = 0

        self._steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._recomputed_tokens = 0
        self._preemptions = 0
        self._slot_steps = 0
        self._waiting_by_rank: Counter[int] = Counter()
        self._running_by_rank: Counter[int] = Counter()

    def add(self, request: Request) -> Progress | None:
        """Take a request. Returns its end where there is nothing to compute, and None where it joined the line.

        Raises ValueError for an id that is live.
        """
        if request.id in self._live:
            raise ValueError(f"request {request.id} is already in the engine")
        if end := self._end_on_arrival(request):
            return end
        self._arrivals += 1
        line = _Line(
            request,
            order=(request.rank, self._arrivals),
            token_limit=min(len(request.prompt_ids) + request.sampling.max_tokens, self._context_length),
        )
        self._live[request.id] = line
        self._enqueue(line)
        return None

    def abort(self, request_id: str) -> bool:
        """Drop a request in whatever state it is and free its blocks; False where it is not live.

        No result comes for it any more, not even from a step that is being computed.
        """
        line = self._live.get(request_id)
        if line is None:
            return False
        self._end(line)
        return True

    @property
    def steps(self) -> int:
        """Steps committed."""
        return self._steps

    def stats(self) -> Stats:
        num_ranks = 1 + max((*self._waiting_by_rank, *self._running_by_rank), default=-1)
        return Stats(
            steps=self._steps,
            running=self._num_running,
            waiting=len(self._waiting),
            slots=self._max_num_seqs,
            blocks_used=self._pool.num_used,
            blocks_total=self._pool.num_blocks,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            recomputed_tokens=self._recomputed_tokens,
            preemptions=self._preemptions,
            slot_steps=self._slot_steps,
            running_by_rank=tuple(self._running_by_rank[rank] for rank in range(num_ranks)),
            waiting_by_rank=tuple(self._waiting_by_rank[rank] for rank in range(num_ranks)),
        )

    def check(self) -> None:
        """Assert that blocks, slots and states agree; for tests."""
        self._pool.check(line.block_ids for line in self._live.values())
        assert self._num_running <= self._max_num_seqs
        running = [*self._decoding.values(), *self._prefilling]
        assert {line.request.id for line in [*running, *self._waiting]} == self._live.keys()
        assert self._running_by_rank == Counter(line.order[0] for line in running)
        assert self._waiting_by_rank == Counter(line.order[0] for line in self._waiting)
        assert all(not line.block_ids for line in self._waiting)
        assert all(len(line.block_ids) * self._block_size >= line.num_computed for line in running)

    def plan(self) -> StepPlan | None:
        """The next step, or None where no request is live. Each plan is committed before the next is made."""
        assert not self._planned, "the last plan was not committed"
        self._make_room_for_decodes()
        pieces = self._plan_prefills()
        decodes = self._decoding.values()
        chunks = [
            Chunk(line.request.id, (line.token_ids[-1],), line.num_computed, line.block_ids, line.sampling)
            for line in decodes
        ]
        self._planned = [*decodes, *(line for line, _ in pieces)]
        chunks += [self._prefill_chunk(line, count) for line, count in pieces]
        return pack(self._steps + 1, chunks, block_size=self._block_size) if chunks else None

    def commit(self, plan: StepPlan, sampled_ids: Sequence[int]) -> list[Progress]:
        """Book a computed step: one Progress for each request that gained a token, in the plan's order.

        sampled_ids  one for each chunk that samples, in the plan's order; those of aborted requests are dropped
        Raises ValueError where their number is wrong.
        """
        lines, self._planned = self._planned, []
        if len(sampled_ids) != sum(chunk.sampling is not None for chunk in plan.chunks):
            raise ValueError(f"step {plan.number} returned {len(sampled_ids)} tokens, not one for each sampling chunk")
        tokens = iter(sampled_ids)
        self._steps += 1
        self._slot_steps += len(plan.chunks)
        progress = []
        for line, chunk in zip(lines, plan.chunks, strict=True):
            token_id = next(tokens) if chunk.sampling is not None else None
            if line.state is _State.ENDED:
                continue
            if line.state is _State.PREFILLING:
                self._count_prefill(line, len(chunk.token_ids))
            line.num_computed += len(chunk.token_ids)
            if token_id is not None:
                progress.append(self._append(line, token_id))
        return progress

    def _make_room_for_decodes(self) -> None:
        """Give each decoding line the block its newest token needs; out of blocks, the last in order yields."""
        for line in list(self._decoding.values()):
            while line.state is _State.DECODING and line.num_computed == len(line.block_ids) * self._block_size:
                blocks = self._pool.allocate(1, after=line.block_ids[-1], expected=self._expected_blocks(line))
                if blocks is None:
                    # Never the first in order unless it is alone, and alone it fits: somebody always gets ahead.
                    self._preempt(max(self._running(), key=_ORDER))
                else:
                    line.block_ids += blocks

    def _plan_prefills(self) -> list[tuple[_Line, int]]:
        """Share what the decodes leave of the step's tokens among prefills, those begun and those that join, in order.

        Nobody is admitted who would get no token in this step: a slot is taken from another only to be used.
        """
        pieces: list[tuple[_Line, int]] = []
        spent = 0
        is_admitting = True
        while (budget := self._max_num_batched_tokens - len(self._decoding) - spent) > 0:
            begun = self._prefilling[len(pieces)] if len(pieces) < len(self._prefilling) else None
            newcomer = self._waiting[0] if is_admitting and self._waiting else None
            if newcomer and (begun is None or newcomer.order < begun.order):
                # Admitted, it is prefilling[len(pieces)]; not admitted, nobody behind it may overtake.
                is_admitting = self._admit(newcomer)
            elif begun:
                count = min(budget, begun.num_uncomputed)
                pieces.append((begun, count))
                spent += count
            else:
                break
        return pieces

    def _prefill_chunk(self, line: _Line, count: int) -> Chunk:
        end = line.num_computed + count
        return Chunk(
            line.request.id,
            token_ids=tuple(line.token_ids[line.num_computed : end]),
            start=line.num_computed,
            block_ids=line.block_ids,
            sampling=line.sampling if end == len(line.token_ids) else None,
        )

    def _count_prefill(self, line: _Line, count: int) -> None:
        start, end = line.num_computed, line.num_computed + count
        self._recomputed_tokens += max(0, min(end, line.num_computed_before) - start)
        self._prompt_tokens += max(0, min(end, len(line.request.prompt_ids)) - max(start, line.num_computed_before))

    def _append(self, line: _Line, token_id: int) -> Progress:
        line.token_ids.append(token_id)
        self._generated_tokens += 1
        if line.state is _State.PREFILLING:
            self._prefilling.remove(line)
            self._decoding[line.request.id] = line
            line.state = _State.DECODING
        finish = self._finish_of(line.sampling, token_id, is_full=len(line.token_ids) >= line.token_limit)
        if finish:
            self._end(line)
        return Progress(line.request.id, (token_id,), finish)

    def _finish_of(self, sampling: Sampling, last_id: int, *, is_full: bool) -> Finish | None:
        if last_id in self._eos_ids and not sampling.ignore_eos:
            return Finish.STOP
        return Finish.LENGTH if is_full else None

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

    @property
    def _num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    def _running(self) -> Iterator[_Line]:
        yield from self._decoding.values()
        yield from self._prefilling

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _expected_blocks(self, line: _Line) -> int:
        """Blocks that the line may still take, for the pool to leave room behind it.

        Its last token is never computed. No more than a slot's share of the pool: most lines end before their limit,
        and room that is left behind one is missing to another.
        """
        return min(
            self._blocks_for(line.token_limit - 1) - len(line.block_ids), self._pool.num_blocks // self._max_num_seqs
        )

    def _admit(self, line: _Line) -> bool:
        """Give a waiting line a slot and blocks for all its tokens, taken from higher ranks where need be."""
        victims = self._victims_for(line)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(victim)
        num_blocks = self._blocks_for(len(line.token_ids))
        blocks = self._pool.allocate(num_blocks, expected=self._expected_blocks(line))
        assert blocks is not None, "the blocks that were counted are not there"
        self._waiting.remove(line)
        self._waiting_by_rank[line.order[0]] -= 1
        line.block_ids = blocks
        line.state = _State.PREFILLING
        bisect.insort(self._prefilling, line, key=_ORDER)
        self._running_by_rank[line.order[0]] += 1
        return True

    def _victims_for(self, line: _Line) -> list[_Line] | None:
        """Who must yield for a waiting line: nobody (empty), the cheapest of the highest ranks, or it stays (None).

        Besides its own blocks it leaves one for each running line, so that nobody is preempted right after it joined.
        """
        num_running, num_free = self._num_running, self._pool.num_free
        num_needed = self._blocks_for(len(line.token_ids))
        if num_running < self._max_num_seqs and num_needed + num_running <= num_free:
            return []
        # Strictly higher ranks only: among equals two requests would take the slot from each other for ever.
        candidates = [other for other in self._running() if other.order[0] > line.order[0]]
        candidates.sort(key=lambda other: (-other.order[0], len(other.token_ids), -other.order[1]))
        for count, victim in enumerate(candidates, start=1):
            num_running -= 1
            num_free += len(victim.block_ids)
            if num_running < self._max_num_seqs and num_needed + num_running <= num_free:
                return candidates[:count]
        return None

    def _preempt(self, line: _Line) -> None:
        """Put a running line back to its place in the waiting line; its blocks are free, its tokens kept."""
        self._leave_batch(line)
        line.num_computed_before = max(line.num_computed_before, line.num_computed)
        line.num_computed = 0
        line.state = _State.WAITING
        self._enqueue(line)
        self._preemptions += 1

    def _end(self, line: _Line) -> None:
        if line.state is _State.WAITING:
            self._waiting.remove(line)
            self._waiting_by_rank[line.order[0]] -= 1
        else:
            self._leave_batch(line)
        line.state = _State.ENDED
        del self._live[line.request.id]

    def _enqueue(self, line: _Line) -> None:
        bisect.insort(self._waiting, line, key=_ORDER)
        self._waiting_by_rank[line.order[0]] += 1

    def _leave_batch(self, line: _Line) -> None:
        if line.state is _State.DECODING:
            del self._decoding[line.request.id]
        else:
            self._prefilling.remove(line)
        self._running_by_rank[line.order[0]] -= 1
        self._pool.release(line.block_ids)
        line.block_ids = ()
