"""Names for the content of KV blocks, by which the prefix cache finds them again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_SIZE = 16
"""Bytes of a digest: among 2^40 blocks two share one by chance with a probability of 2^-49."""

assert array("i").itemsize == 4, "token ids are hashed as int32"


class Digests:
    """Names each full block by its tokens, all tokens before it, and the tenant.

        tenant ──▶ root ──▶ chain[0] ──▶ chain[1] ──▶ …
                            tokens 0 …   tokens block_size …

    A tenant's root is the parent of its first block: nobody can hit another's blocks, or learn from the time a prompt
    takes what another has sent. The hash is keyed because in an unkeyed one a tenant could search at leisure for two
    prompts of one name. Names hold on machines of one byte order that share the secret.
    """

    def __init__(self, secret: bytes, block_size: int) -> None:
        """Raises ValueError for a block size below 1, and for a secret that is empty or longer than a key of BLAKE2b.

        An empty secret is no key at all, and drawing one here would make the same calls name blocks differently: who
        has no secret to keep draws it, os.urandom(32).
        """
        if not 1 <= len(secret) <= blake2b.MAX_KEY_SIZE:
            raise ValueError(f"the secret has {len(secret)} bytes; it must have 1 to {blake2b.MAX_KEY_SIZE}")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block holds at least one token")
        self._block_size = block_size
        # Made once and copied for each digest, which costs less than to key each anew. `person` keeps a tenant's name
        # from being read as a block.
        self._tenant_hash = blake2b(key=secret, digest_size=_DIGEST_SIZE, person=b"tenant")
        self._block_hash = blake2b(key=secret, digest_size=_DIGEST_SIZE, person=b"block")

    def extend(self, chain: list[bytes], token_ids: Sequence[int], tenant: str) -> None:
        """Append to `chain` the digests of the full blocks of `token_ids` that it does not have yet.

        chain      chain[i] names tokens 0 … (i + 1) × block_size; made by this method from the same tokens and tenant
        token_ids  all tokens of the sequence, each an int32
        Raises OverflowError for a token id that is none.
        """
        num_named, num_full = len(chain), len(token_ids) // self._block_size
        if num_full <= num_named:
            return
        parent = chain[-1] if chain else self._root(tenant)
        unnamed = token_ids[num_named * self._block_size : num_full * self._block_size]
        data = array("i", unnamed).tobytes()  # at once: block by block this would cost more than the hashing
        width = 4 * self._block_size
        copy_hash = self._block_hash.copy
        for start in range(0, len(data), width):
            block_hash = copy_hash()
            block_hash.update(parent)
            block_hash.update(data[start : start + width])
            parent = block_hash.digest()
            chain.append(parent)

    def _root(self, tenant: str) -> bytes:
        tenant_hash = self._tenant_hash.copy()
        tenant_hash.update(tenant.encode())
        return tenant_hash.digest()
