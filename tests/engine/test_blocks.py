"""The pool of KV blocks: nothing lost, nothing handed out twice, neighbours where possible, known content kept."""

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


def publish(pool: BlockPool, block_ids: tuple[int, ...], digests: str) -> None:
    """Publish each block under a letter."""
    for block_id, digest in zip(block_ids, digests, strict=True):
        pool.publish(block_id, digest.encode())


def found(pool: BlockPool, digests: str) -> str:
    """The letters that still name a block."""
    return "".join(digest for digest in digests if pool.find(digest.encode()) is not None)


def cache(pool: BlockPool, digests: str) -> tuple[int, ...]:
    """A table of as many published blocks as letters, used once and released."""
    block_ids = pool.allocate(len(digests)) or ()
    publish(pool, block_ids, digests)
    pool.release(block_ids)
    return block_ids


def test_a_published_block_is_found_while_referenced_and_after() -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(2) or ()
    assert pool.find(b"a") is None
    publish(pool, block_ids, "ab")
    assert pool.find(b"a") == block_ids[0]
    assert (pool.num_used, pool.num_cached, pool.num_free) == (2, 0, 2)
    pool.release(block_ids)
    assert pool.find(b"b") == block_ids[1]
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 2, 4)
    pool.check([])


def test_a_cached_block_comes_back_into_use() -> None:
    pool = BlockPool(2)
    block_ids = cache(pool, "ab")
    pool.retain(block_ids)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (2, 0, 0)
    assert pool.allocate(1) is None, "what is in use is not evicted"
    pool.check([block_ids])


def test_the_tail_of_a_table_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    cache(pool, "abcd")
    for left in ("abc", "ab", "a", ""):
        pool.allocate(1)
        assert found(pool, "abcd") == left


def test_the_least_recently_released_table_is_evicted_first() -> None:
    pool = BlockPool(6)
    first = cache(pool, "ab")
    cache(pool, "cd")
    cache(pool, "ef")
    pool.retain(first)
    pool.release(first)
    for left in ("abcef", "abef", "abe", "ab"):
        pool.allocate(1)
        assert found(pool, "abcdef") == left


def test_looking_a_block_up_is_no_use_of_it() -> None:
    pool = BlockPool(2)
    cache(pool, "a")
    cache(pool, "b")
    pool.find(b"a")
    pool.allocate(1)
    assert found(pool, "ab") == "b"


def test_nothing_is_evicted_while_blank_blocks_suffice() -> None:
    pool = BlockPool(8)
    cache(pool, "abc")
    pool.allocate(5, expected=8)
    assert found(pool, "abc") == "abc"
    pool.check()


def test_no_more_is_evicted_than_is_missing() -> None:
    pool = BlockPool(8)
    cache(pool, "abcde")
    pool.allocate(5, expected=8)
    assert found(pool, "abcde") == "abc"
    pool.check()


def test_a_refused_allocation_evicts_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    cache(pool, "ab")
    assert pool.allocate(3) is None
    assert found(pool, "ab") == "ab"


def test_evicted_neighbours_are_one_run_again() -> None:
    pool = BlockPool(16)
    cache(pool, "abcdefghijklmnop")
    assert pool.allocate(16) == tuple(range(16))


def test_the_first_of_two_blocks_with_one_content_stays_the_known_one() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or ()
    publish(pool, (first, second), "aa")
    assert pool.find(b"a") == first
    pool.release((second,))
    assert (pool.num_cached, pool.num_free) == (0, 1), "the second copy is blank at once"
    pool.check([(first,)])


def test_a_block_keeps_the_digest_it_has() -> None:
    pool = BlockPool(1)
    (block_id,) = cache(pool, "a")
    pool.publish(block_id, b"b")
    assert found(pool, "ab") == "a"
    pool.check([])


def test_a_blank_block_has_nothing_to_publish() -> None:
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="block 0 is blank"):
        pool.publish(0, b"a")
    pool.check([])


def test_a_forgotten_block_is_blank_once_it_has_no_reference() -> None:
    pool = BlockPool(4)
    cached = cache(pool, "ab")
    held = pool.allocate(1) or ()
    publish(pool, held, "c")
    pool.forget((*cached, *held))
    assert found(pool, "abc") == ""
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 3)
    pool.release(held)
    assert pool.num_cached == 0
    assert pool.allocate(4) == tuple(range(4))


def test_only_blocks_without_a_reference_cost_capacity_when_retained() -> None:
    pool = BlockPool(8)
    cached = cache(pool, "abc")
    pool.retain(cached[:1])
    assert pool.count_idle(cached) == 2
    assert pool.count_idle(cached * 2) == 2, "retained twice, a block is taken once"
    num_free = pool.num_free
    pool.retain(cached)
    assert pool.num_free == num_free - 2


DIGESTS = [bytes([letter]) for letter in b"abcdefghij"]


class PoolMachine(RuleBasedStateMachine):
    """Any mix of taking, growing, sharing, publishing, finding and freeing, checked against a naive model.

    The model is the tables that hold the references, the digests by block, and the cached blocks as a list in the order
    of their last use. Which blank blocks are handed out is the pool's choice; which cached ones are evicted is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[int, ...]] = []
        self.digest_of: dict[int, bytes] = {}
        self.cached: list[int] = []

    @initialize(num_blocks=st.integers(1, 24))
    def make_pool(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)

    @rule(count=st.integers(1, 8), expected=st.integers(0, 30))
    def start(self, count: int, expected: int) -> None:
        if block_ids := self.allocate(count, expected=expected):
            self.tables.append(block_ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 4))
    def grow(self, data: st.DataObject, count: int) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.tables[index] += self.allocate(count, after=self.tables[index][-1])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.retain(table)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), digests=st.lists(st.sampled_from(DIGESTS), min_size=1, max_size=8))
    def publish(self, data: st.DataObject, digests: list[bytes]) -> None:
        table = data.draw(st.sampled_from(self.tables))
        for block_id, digest in zip(table, digests, strict=False):
            self.pool.publish(block_id, digest)
            if digest not in self.digest_of.values():
                self.digest_of.setdefault(block_id, digest)

    @rule(digests=st.lists(st.sampled_from(DIGESTS), min_size=1, max_size=4, unique=True))
    def hit(self, digests: list[bytes]) -> None:
        hits = tuple(block_id for digest in digests if (block_id := self.pool.find(digest)) is not None)
        num_left = self.pool.num_free - self.pool.count_idle(hits)
        self.pool.retain(hits)
        assert self.pool.num_free == num_left
        self.cached = [block_id for block_id in self.cached if block_id not in hits]
        if hits:
            self.tables.append(hits)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        held = self.held
        self.cached += [block_id for block_id in reversed(table) if block_id not in held and block_id in self.digest_of]

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.integers(0, self.pool.num_blocks - 1), max_size=4))
        self.pool.forget(block_ids)
        for block_id in block_ids:
            self.digest_of.pop(block_id, None)
        self.cached = [block_id for block_id in self.cached if block_id not in block_ids]

    @invariant()
    def pool_and_model_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.tables)
        assert self.pool.num_used == len(self.held)
        assert self.pool.num_free == self.pool.num_blocks - len(self.held)
        assert self.pool.num_cached == len(self.cached)
        block_of = {digest: block_id for block_id, digest in self.digest_of.items()}
        assert [self.pool.find(digest) for digest in DIGESTS] == [block_of.get(digest) for digest in DIGESTS]

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.tables:
                self.pool.release(table)
            self.pool.check([])

    @property
    def held(self) -> set[int]:
        return {block_id for table in self.tables for block_id in table}

    @property
    def blank(self) -> set[int]:
        return set(range(self.pool.num_blocks)) - self.held - set(self.cached)

    def allocate(self, count: int, *, after: int | None = None, expected: int = 0) -> tuple[int, ...]:
        """What the pool hands out, empty where it refuses; the model evicts what is missing."""
        blank = self.blank
        block_ids = self.pool.allocate(count, after=after, expected=expected)
        assert (block_ids is None) == (count > len(blank) + len(self.cached))
        if block_ids is None:
            return ()
        num_missing = max(0, count - len(blank))
        evicted, self.cached = self.cached[:num_missing], self.cached[num_missing:]
        for block_id in evicted:
            del self.digest_of[block_id]
        assert len(set(block_ids)) == count and set(block_ids) <= blank.union(evicted)
        return block_ids


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_only_blocks_of_ones_own_become_free_by_releasing() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    assert table is not None
    pool.retain(table[:1])
    assert pool.own(table) == list(table[1:])
    pool.release(table)
    assert pool.num_free == 2
