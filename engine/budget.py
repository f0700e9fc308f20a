"""What one step may still take in: tokens, and milliseconds where sequences that decode would wait for it."""

from __future__ import annotations

from engine.cost import StepCost, Work
from engine.limits import Limits


class Budget:
    """The rest of a step's budget, as pieces of prompts are planned."""

    def __init__(self, limits: Limits, cost: StepCost, decodes: Work) -> None:
        """decodes  what the step computes besides prompts"""
        self._limits = limits
        self._cost = cost
        self._work = decodes
        self._tokens = limits.max_num_batched_tokens - decodes.num_decodes
        self._most_ms = None if limits.step_budget_ms is None else cost.planned_ms(limits.step_budget_ms)
        # Without decodes nobody waits for the step, and the number of tokens alone bounds it.
        self._is_timed = self._most_ms is not None and decodes.num_decodes > 0
        self._is_empty = True

    @property
    def has_room(self) -> bool:
        return self._tokens > 0

    def share(self, start: int, end: int, *, is_contested: bool) -> int:
        """Tokens of a prompt, from position `start` on, that the step may compute: 0 where it has no room for a piece.

        is_contested  others want a part: then a long prompt gets half of what is left
        """
        wanted = end - start
        part = 2 if is_contested else 1
        count = min(wanted, -(-self._tokens // part))
        least = min(wanted, self._tokens, self._limits.block_size)
        if self._is_timed and count:
            count = min(count, self._tokens_in_time(start, count, part))
        if count >= least:
            return count
        # Crumbs help nobody; but one block goes in always, or prompts would wait for ever beside many decodes.
        return least if self._is_empty else 0

    def rest(self, start: int, end: int) -> int:
        """Tokens that a piece may take on top, up to position `end`, once every prompt has had its share."""
        count = min(end - start, self._tokens)
        return self._tokens_in_time(start, count, 1) if self._is_timed and count else count

    def spend(self, start: int, count: int) -> None:
        """Book a piece."""
        self._work += Work.piece(start, count)
        self._tokens -= count
        self._is_empty = False

    def give_back(self, decodes: Work) -> None:
        """These decodes are not in the step after all."""
        self._work -= decodes
        self._tokens += decodes.num_decodes

    def _tokens_in_time(self, start: int, count: int, part: int) -> int:
        assert self._most_ms is not None
        planned_ms = self._cost.predict(self._work)
        until_ms = planned_ms + (self._most_ms - planned_ms) / part
        return self._cost.tokens_within(until_ms, self._work, start, count)
