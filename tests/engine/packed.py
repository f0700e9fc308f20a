"""Sequences packed beside each other over a paged cache, as the engine computes them; for tests of models."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention import BlockDecode, KVCache, PagedAttention
from engine.models.decoder import Decoder
from engine.request import Sampling
from engine.step import Chunk, pack

CPU = torch.device("cpu")
BLOCK_SIZE = 4


class Sequences:
    """Several sequences on one paged cache, fed in steps; keeps the logits of every position."""

    def __init__(self, decoder: Decoder, tables: list[tuple[int, ...]]) -> None:
        self._decoder = decoder
        self._tables = tables
        num_blocks = max(max(table) for table in tables) + 1
        self._cache = KVCache(
            decoder.shape, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU
        )
        self._done = [0] * len(tables)
        self.logits: list[list[torch.Tensor]] = [[] for _ in tables]

    @torch.inference_mode()
    def step(self, pieces: dict[int, list[int]]) -> None:
        """Compute the next tokens of some sequences, decodes first."""
        chunks = [
            Chunk(str(index), tuple(tokens), self._done[index], self._tables[index], Sampling(max_tokens=1))
            for index, tokens in sorted(pieces.items(), key=lambda piece: len(piece[1]) > 1)
        ]
        plan = pack(1, chunks, block_size=BLOCK_SIZE)
        tokens, positions = torch.from_numpy(plan.token_ids.astype(np.int64)), torch.from_numpy(plan.positions)
        attention = PagedAttention(self._cache, plan, BlockDecode)
        rows = iter(self._decoder.logits(tokens, positions, torch.arange(len(tokens)), attention))
        for chunk in chunks:
            self.logits[int(chunk.request_id)] += [next(rows) for _ in chunk.token_ids]
            self._done[int(chunk.request_id)] += len(chunk.token_ids)

    def run(self, tokens: list[list[int]]) -> None:
        """Feed 22 tokens of the first of three sequences, 18 of the second and 14 of the third, in all manners."""
        self.step({0: tokens[0][:7], 1: tokens[1][:1]})  # prefills, one of a single token
        self.step({0: tokens[0][7:12], 1: tokens[1][1:9], 2: tokens[2][:4]})  # pieces that go on, and a whole block
        self.step({0: tokens[0][12:13], 1: tokens[1][9:18], 2: tokens[2][4:5]})  # decodes beside a piece
        for position in range(13, 22):  # decodes alone, over the edges of blocks
            self.step({0: [tokens[0][position]], 2: [tokens[2][position - 8]]})
