"""The workload that our engine and service are measured with: mixed lengths, half of it with a common beginning.

Prompts are lognormal, 16 to 512 tokens, half of the requests start with the same 64 tokens; outputs are uniform, 10 to
200 tokens, greedy, past any end-of-sequence token. All requests are there from the start. The token ids are random.

    python -m benchmarks.workload

Prints one JSON object: what is in it.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass

import numpy as np

from engine.request import Request, Sampling

NUM_REQUESTS = 64
MEDIAN_PROMPT, SPREAD = 110, 0.8
"""Median of the prompts' lengths in tokens, and σ of their logarithm."""
MIN_PROMPT, MAX_PROMPT = 16, 512
MIN_OUTPUT, MAX_OUTPUT = 10, 200
PREFIX = 64
"""Tokens that half of the prompts have in common; at least 16 of their own follow."""
FIRST_ID, LAST_ID = 1000, 39_999
"""Ordinary tokens of SmolLM2's vocabulary: no special ones."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request of the workload."""

    prompt_ids: tuple[int, ...]
    max_tokens: int

    def request(self, request_id: str) -> Request:
        return Request(request_id, self.prompt_ids, Sampling(self.max_tokens, temperature=0.0, ignore_eos=True))


def make_workload(count: int = NUM_REQUESTS, *, seed: int = 2026) -> list[Item]:
    """The first `count` requests under this seed, in the order in which they arrive."""
    draw = np.random.default_rng(seed)
    prefix = _ids(draw, PREFIX)
    items = []
    for index in range(count):
        length = int(np.clip(round(draw.lognormal(np.log(MEDIAN_PROMPT), SPREAD)), MIN_PROMPT, MAX_PROMPT))
        common = prefix if index % 2 else ()
        own = max(length - len(common), MIN_PROMPT)
        items.append(Item(common + _ids(draw, own), int(draw.integers(MIN_OUTPUT, MAX_OUTPUT + 1))))
    return items


def _ids(draw: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(draw.integers(FIRST_ID, LAST_ID + 1, count).tolist())


def describe(items: list[Item]) -> dict[str, float]:
    prompts = [len(item.prompt_ids) for item in items]
    return {
        "requests": len(items),
        "prompt_tokens": sum(prompts),
        "output_tokens": sum(item.max_tokens for item in items),
        "shortest_prompt": min(prompts),
        "median_prompt": statistics.median(prompts),
        "longest_prompt": max(prompts),
        "with_prefix": sum(item.prompt_ids[:PREFIX] == items[1].prompt_ids[:PREFIX] for item in items),
    }


if __name__ == "__main__":
    print(json.dumps(describe(make_workload())))
