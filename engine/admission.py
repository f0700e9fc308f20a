"""Who may join the running batch, and who gives up a slot for it.

There must be a slot, blocks for all its tokens, and memory for what everybody is expected to become. Where there is
not, sequences of strictly higher ranks may yield: among equals two would take the slot from each other for ever.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from engine.lengths import Lengths, longest_first, peak_blocks
from engine.limits import Limits, Preemption
from engine.memory import Match
from engine.policies import Policy
from engine.running import RunningBatch
from engine.sequence import Sequence

_GROWTH = 8
"""Whoever was preempted often is preempted again once it has gained one token for so many that it had: how often that
happens grows with the logarithm of its length, and all that is computed again for it with its length."""


class Admission:
    """Looks at the batch and never changes it."""

    def __init__(self, limits: Limits, batch: RunningBatch, policy: Policy, lengths: Lengths) -> None:
        self._limits = limits
        self._batch = batch
        self._policy = policy
        self._lengths = lengths

    def is_capped(self, newcomer: Sequence) -> bool:
        """Whether its tenant has all the slots that it may hold."""
        request = newcomer.request
        cap = self._limits.max_tenant_seqs.get(request.rank)
        return cap is not None and self._batch.by_tenant[request.rank, request.tenant] >= cap

    def must_wait(self, newcomer: Sequence, match: Match, *, step: int) -> bool:
        """Whether somebody computes a block that it could share, or it just yielded."""
        has_maker = match.maker is not None and match.maker.rank <= newcomer.rank
        return has_maker or newcomer.left_step == step

    def victims_for(self, newcomer: Sequence, match: Match, *, step: int, spared: set[int]) -> list[Sequence] | None:
        """Who must yield for a waiting sequence: nobody (empty), the cheapest of high ranks, or it stays (None).

        spared  numbers of sequences that the step computes already
        """
        if self._has_room(newcomer, match, without=()):
            return []
        candidates = [other for other in self._who_may_yield(newcomer.rank, step) if other.number not in spared]
        candidates.sort(key=lambda other: (-other.rank, other.num_tokens, -other.number))

        def is_enough(count: int) -> bool:  # the more yield, the more room there is
            return self._has_room(newcomer, match, without=candidates[:count])

        most = 1
        while not is_enough(most):
            if most >= len(candidates):
                return None
            most = min(2 * most, len(candidates))
        return candidates[: bisect.bisect_left(range(most), True, lo=most // 2, key=is_enough)]

    def _who_may_yield(self, rank: int, step: int) -> list[Sequence]:
        """Running sequences that may be preempted for this rank. Looked for in arrays: most often there are none."""
        table, rows, limits = self._batch.table, self._batch.rows, self._limits
        ranks = table.ranks[rows]
        is_past = (ranks > rank) & (step - table.joined_steps[rows] >= limits.quantum_steps)
        for higher in set(ranks[is_past].tolist()):
            if not self._policy.may_yield(higher):
                is_past &= ranks != higher
        found: list[Sequence] = table.sequences[rows[is_past]].tolist()
        if limits.preemption is Preemption.DISCARD:
            found = [other for other in found if not other.has_shown]
        return [other for other in found if other.num_preemptions < limits.max_preemptions or _has_grown(other)]

    def _has_room(self, newcomer: Sequence, match: Match, *, without: Items[Sequence]) -> bool:
        """Whether slot, blocks and memory are there.

        without  running sequences that would yield
        """
        table, memory = self._batch.table, self._batch.memory
        if not table.num_free + len(without):
            return False
        if match.num_needed > memory.num_free + sum(memory.num_own(other) for other in without):
            return False
        rows = self._batch.rows
        if without:
            rows = rows[~np.isin(rows, [other.slot for other in without])]
        if not len(rows):
            return True  # alone it fits
        tokens = np.append(table.num_tokens[rows], newcomer.num_tokens)
        remaining = np.maximum(np.append(self._expected_ends(rows), self.expected_end(newcomer)) - tokens, 1)
        size = self._limits.block_size
        if int((tokens + remaining).sum()) + len(tokens) * (size - 1) <= memory.num_blocks * size:
            return True  # even if all of them ended at once
        if peak_blocks(tokens, remaining, size) <= memory.num_blocks:
            return True  # even if nobody shared a block
        if not match.block_ids and not memory.is_shared(self._batch.rows):
            return False
        tokens -= size * memory.num_repeated(rows, match.block_ids, longest_first(remaining))
        return peak_blocks(tokens, remaining, size) <= memory.num_blocks

    def _expected_ends(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """[rows] Tokens at which running sequences are expected to end; whoever outran it is looked at again."""
        table = self._batch.table
        for slot in rows[table.num_tokens[rows] >= table.ends[rows]].tolist():
            table.ends[slot] = self.expected_end(table.sequences[slot])
        return table.ends[rows]

    def expected_end(self, sequence: Sequence) -> int:
        """Tokens, prompt included, at which the sequence is expected to end; more than it has."""
        request = sequence.request
        most = sequence.token_limit - len(request.prompt_ids)
        expected = request.expected_tokens
        if expected is None or expected <= sequence.num_generated:
            expected = self._lengths.expected(request.kind, at_least=sequence.num_generated, at_most=most)
        return len(request.prompt_ids) + max(min(expected, most), sequence.num_generated + 1)


def _has_grown(sequence: Sequence) -> bool:
    """Whether it has gained, since it joined, what makes another preemption worth its price."""
    return sequence.num_tokens - sequence.num_joined > sequence.num_joined // _GROWTH
