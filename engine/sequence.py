"""A request's token line inside the scheduler, and the state that it is in.

        add                 joins                last prompt token computed
──────────────▶ WAITING ──────────────▶ PREFILLING ──────────────▶ DECODING
                   ▲                         │                        │
                   └─────────────────────────┴── preempted ───────────┘
any state ── finish, abort, expire ──▶ ENDED
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from engine.counts import TokenCounts
from engine.request import Finish, Request
from engine.step import Ints, Past

_NO_TOKENS: Ints = np.zeros(0, dtype=np.int32)


class State(Enum):
    WAITING = auto()
    """Holds no slot and no block of the cache; perhaps blocks of host memory."""
    PREFILLING = auto()
    """Has a slot and blocks for all its tokens, some of which are not computed yet."""
    DECODING = auto()
    """Has a slot; all its tokens but the newest are computed."""
    ENDED = auto()
    """Holds nothing."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens and what the scheduler knows of them."""

    request: Request
    number: int
    """Counts arrivals."""
    rank: int
    """The tier that the policy sees."""
    queue: Hashable
    """Where it waits."""
    place: float
    """Where in the queue; equals in the order of arrival."""
    arrived_s: float
    token_limit: int
    """Tokens at which the line is full, the prompt included."""
    end_ids: frozenset[int]
    """Tokens that end it."""
    token_ids: list[int] = field(init=False)
    """Prompt, resumed tokens and generated tokens."""
    state: State = State.WAITING
    slot: int = -1
    """Its row in the table while it has one."""
    digests: list[bytes] = field(default_factory=list)
    """Names of its full blocks, as far as somebody asked for them."""
    host_ids: tuple[int, ...] = ()
    """Blocks of host memory that hold its computed tokens while it waits."""
    num_swapped: int = 0
    """Tokens whose keys and values are there."""
    num_seen: int = field(init=False)
    """Tokens that were in a cache once: computing them again is a recomputation."""
    num_charged: int = field(init=False)
    """Tokens of the prompt that the policy was told of, or that earlier attempts computed."""
    left_step: int = 0
    """The step in which it last lost its slot."""
    num_joined: int = 0
    """Tokens that it had when it last joined."""
    num_preemptions: int = 0
    """How often a higher tier took its slot."""

    _counts: TokenCounts | None = field(init=False, default=None)
    """Where the sampler asks for them."""
    _tail_length: int = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.token_ids = [*request.prompt_ids, *request.resumed_ids]
        self._tail_length = max((len(word) - 1 for word in request.sampling.bad_words), default=0)
        if request.sampling.needs_counts:
            self._counts = TokenCounts(request.prompt_ids, request.resumed_ids)
        self.num_seen = self.num_charged = len(self.token_ids) if self.request.resumed_ids else 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Over all attempts."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def has_shown(self) -> bool:
        """Whether this attempt has generated a token."""
        return self.num_generated > len(self.request.resumed_ids)

    @property
    def past(self) -> Past:
        """What the sampler asks to know of its tokens."""
        counts = self._counts
        return Past(
            num_generated=self.num_generated,
            tail=tuple(self.token_ids[-self._tail_length :]) if self._tail_length else (),
            token_ids=counts.ids if counts else _NO_TOKENS,
            counts=counts.counts if counts else _NO_TOKENS,
        )

    def append(self, token_id: int) -> None:
        """A token was generated."""
        self.token_ids.append(token_id)
        if self._counts is not None:
            self._counts.add(token_id)

    def finish(self) -> Finish | None:
        """Why it ends with its newest token, if it does."""
        if self.token_ids[-1] in self.end_ids and self.num_generated > self.request.sampling.min_tokens:
            return Finish.STOP
        return Finish.LENGTH if self.num_tokens >= self.token_limit else None

    @property
    def order(self) -> tuple[int, int]:
        """(rank, arrival): who yields last where blocks run out."""
        return self.rank, self.number
