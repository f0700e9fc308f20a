"""What a policy decides. It sees requests and tokens, never blocks or slots.

Requests wait in queues: `queue` names a request's, `place` orders it there once and for all, and `turn` says, each time
that somebody may join the batch, whose queue is next. So a policy may change its mind about tenants at every pick, and
thousands of waiting requests are never sorted again.
"""

from __future__ import annotations

from collections.abc import Hashable

from engine.request import Request


class Policy:
    """One queue, in the order of arrival; no tiers."""

    def rank(self, request: Request) -> int:
        """The tier that counts: a request takes slots from those of higher ranks."""
        return 0

    def queue(self, request: Request) -> Hashable:
        """The queue that the request waits in."""
        return None

    def place(self, request: Request, *, arrived_s: float, expected_tokens: int) -> float:
        """Its place in the queue: smaller goes first, of equals who came first.

        expected_tokens  tokens that it is predicted to generate
        """
        return arrived_s

    def turn(self, queue: Hashable, *, waited_s: float) -> tuple[float, ...]:
        """The queue with the smallest goes first.

        waited_s  how long it has been waiting to be served
        """
        return ()

    def arrive(self, request: Request, *, is_idle: bool) -> None:
        """Note an arrival; is_idle where nobody of its queue waits or runs."""

    def depart(self, request: Request) -> None:
        """Note an end: nobody of the request's queue waits or runs any more."""

    def join(self, request: Request, *, prefilled: int) -> None:
        """Note that it joins the batch; prefilled: tokens of its prompt that this takes, for it to be charged."""

    def serve(self, request: Request, *, now: float, computed: int, generated: int) -> None:
        """Note what a step did for the request's queue: tokens that were computed, again or not, and generated."""

    def may_yield(self, rank: int) -> bool:
        """Whether sequences of this tier may be preempted for a higher one now."""
        return True
