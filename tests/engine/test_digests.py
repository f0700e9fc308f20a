"""Digests of blocks: one name for one prefix of one tenant under one secret."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.digests import Digests

SECRET = b"a secret of the engine"
TOKEN_IDS = list(range(1000, 1064))


def chain_of(token_ids: list[int], *, tenant: str = "a", secret: bytes = SECRET, block_size: int = 4) -> list[bytes]:
    chain: list[bytes] = []
    Digests(secret, block_size).extend(chain, token_ids, tenant)
    return chain


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"),
    [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (63, 15), (64, 16)],  # num_tokens // 4
)
def test_only_full_blocks_are_named(num_tokens: int, num_blocks: int) -> None:
    assert len(chain_of(TOKEN_IDS[:num_tokens])) == num_blocks


def test_digests_are_16_bytes_and_all_differ() -> None:
    chain = chain_of([7] * 64)
    assert {len(digest) for digest in chain} == {16}
    assert len(set(chain)) == len(chain), "equal blocks at different places are different blocks"


@given(cuts=st.lists(st.integers(0, 64), max_size=8))
def test_a_chain_is_the_same_in_whatever_chunks_it_grows(cuts: list[int]) -> None:
    digests, chain = Digests(SECRET, 4), []
    for end in [*sorted(cuts), 64]:
        digests.extend(chain, TOKEN_IDS[:end], "a")
    assert chain == chain_of(TOKEN_IDS)


def test_fewer_tokens_than_are_named_change_nothing() -> None:
    chain = chain_of(TOKEN_IDS)
    Digests(SECRET, 4).extend(chain, TOKEN_IDS[:9], "a")
    assert chain == chain_of(TOKEN_IDS)


def test_lists_and_tuples_of_the_same_tokens_have_the_same_digests() -> None:
    chain: list[bytes] = []
    Digests(SECRET, 4).extend(chain, tuple(TOKEN_IDS), "a")
    assert chain == chain_of(TOKEN_IDS)


def test_a_changed_token_renames_its_block_and_all_behind_it() -> None:
    changed = [*TOKEN_IDS]
    changed[21] += 1  # in block 21 // 4 = 5
    before, after = chain_of(TOKEN_IDS), chain_of(changed)
    assert before[:5] == after[:5]
    assert not set(before[5:]) & set(after[5:])


def test_tenants_share_no_digest() -> None:
    chains = [chain_of(TOKEN_IDS, tenant=tenant) for tenant in ("", "a", "b", "ab", "é")]
    assert len({digest for chain in chains for digest in chain}) == sum(map(len, chains))


def test_another_secret_gives_other_digests() -> None:
    assert not set(chain_of(TOKEN_IDS)) & set(chain_of(TOKEN_IDS, secret=b"another"))


def test_a_tenant_named_like_the_first_block_of_another_does_not_start_behind_it() -> None:
    digests, first = Digests(SECRET, 4), b"".join(token_id.to_bytes(4, sys.byteorder) for token_id in [1, 2, 3, 4])
    victim = next(name for name in map(str, range(1_000_000)) if digests._root(name).isascii())
    forged = (digests._root(victim) + first).decode()  # a name of just the bytes that the victim's block is hashed from
    assert not set(chain_of([1, 2, 3, 4, *TOKEN_IDS], tenant=victim)) & set(chain_of(TOKEN_IDS, tenant=forged))


@pytest.mark.parametrize("secret", [b"", b"x" * 65])
def test_a_secret_that_is_no_key_is_refused(secret: bytes) -> None:
    with pytest.raises(ValueError, match=f"the secret has {len(secret)} bytes"):
        Digests(secret, 4)


def test_a_block_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        Digests(SECRET, 0)


def test_a_token_id_beyond_int32_is_an_error_not_another_token() -> None:
    chain: list[bytes] = []
    with pytest.raises(OverflowError):
        Digests(SECRET, 1).extend(chain, [1, 2**32 + 1], "a")
    assert chain == []
