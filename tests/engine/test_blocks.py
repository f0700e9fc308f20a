"""The pool of KV blocks: nothing lost, nothing handed out twice, neighbours where possible."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.blocks import BlockPool


def is_contiguous(block_ids: tuple[int, ...]) -> bool:
    return all(right == left + 1 for left, right in pairwise(block_ids))


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)


def test_all_blocks_can_be_taken_and_not_one_more() -> None:
    pool = BlockPool(8)
    taken = pool.allocate(8)
    assert taken is not None and sorted(taken) == list(range(8))
    assert pool.allocate(1) is None
    pool.release(taken)
    assert (pool.num_free, pool.num_used) == (8, 0)
    pool.check([])


def test_a_refused_allocation_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    pool.check()


def test_a_sequence_grows_into_the_room_it_announced() -> None:
    pool = BlockPool(64)
    tables = [pool.allocate(2, expected=16) or () for _ in range(4)]
    for _ in range(14):  # all four in turn, up to what each announced: 4 × 16 blocks
        tables = [table + (pool.allocate(1, after=table[-1]) or ()) for table in tables]
    assert pool.num_free == 0
    assert all(is_contiguous(table) for table in tables)


def test_a_sequence_without_room_shares_the_largest_run_with_its_neighbour() -> None:
    pool = BlockPool(16)
    first = pool.allocate(1, expected=100)
    second = pool.allocate(1, expected=100)
    assert first == (8,)
    assert second == (4,)


def test_an_occupied_neighbour_does_not_stop_growth() -> None:
    pool = BlockPool(4)
    assert pool.allocate(4) == (0, 1, 2, 3)
    pool.release((0,))
    assert pool.allocate(1, after=1) == (0,), "2 is taken, so any free block will do"


def test_a_request_larger_than_every_run_is_pieced_together() -> None:
    pool = BlockPool(9)
    assert pool.allocate(9) == tuple(range(9))
    pool.release((0, 1, 2, 4, 6, 7))
    taken = pool.allocate(6)
    assert taken == (0, 1, 2, 6, 7, 4), "largest runs first"
    pool.check()


def test_freed_neighbours_are_one_run_again_in_whatever_order_they_return() -> None:
    for seed in range(20):
        pool = BlockPool(12)
        block_ids = list(pool.allocate(12) or ())
        random.Random(seed).shuffle(block_ids)
        for block_id in block_ids:
            pool.release((block_id,))
            pool.check()
        assert pool.allocate(12) == tuple(range(12))


def test_a_shared_block_is_free_only_after_its_last_reference() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(1) or ()
    pool.retain(block_ids)
    pool.check([block_ids, block_ids])
    pool.release(block_ids)
    assert pool.num_used == 1
    pool.release(block_ids)
    assert pool.num_used == 0


def test_freeing_twice_or_sharing_a_free_block_is_an_error() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(1) or ()
    pool.release(block_ids)
    with pytest.raises(ValueError, match="freed twice"):
        pool.release(block_ids)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.retain(block_ids)
    pool.check([])


def test_a_half_full_pool_keeps_sequences_contiguous_over_many_generations() -> None:
    rng = random.Random(0)
    pool = BlockPool(1024)
    lengths = {}  # a sequence's table -> the blocks it will come to hold
    tables: list[tuple[int, ...]] = []
    finished = contiguous = 0
    while finished < 2000:
        while len(tables) < 32:
            expected = rng.randint(2, 32)
            tables.append(pool.allocate(1, expected=expected) or ())
            lengths[tables[-1][0]] = rng.randint(1, expected)  # many end before their limit
        index = rng.randrange(len(tables))
        table = tables[index]
        if len(table) < lengths[table[0]]:
            tables[index] += pool.allocate(1, after=table[-1]) or ()
        else:
            finished += 1
            contiguous += is_contiguous(table)
            pool.release(tables.pop(index))
    pool.check(tables)
    assert contiguous / finished > 0.99


def test_the_heap_of_runs_stays_small() -> None:
    pool = BlockPool(64)
    for _ in range(1000):
        pool.release(pool.allocate(3, expected=7) or ())
    pool.check([])
    assert len(pool._largest) <= 4 + 64 + 1


class PoolMachine(RuleBasedStateMachine):
    """Any mix of taking, growing, sharing and freeing, checked against the tables that hold the references."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[int, ...]] = []

    @initialize(num_blocks=st.integers(1, 24))
    def make_pool(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)

    @rule(count=st.integers(1, 8), expected=st.integers(0, 30))
    def start(self, count: int, expected: int) -> None:
        num_free = self.pool.num_free
        block_ids = self.pool.allocate(count, expected=expected)
        assert (block_ids is None) == (count > num_free)
        if block_ids:
            assert len(block_ids) == len(set(block_ids)) == count
            self.tables.append(block_ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 4))
    def grow(self, data: st.DataObject, count: int) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.tables[index] += self.pool.allocate(count, after=self.tables[index][-1]) or ()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.retain(table)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.tables)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
