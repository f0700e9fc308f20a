"""Seeds of the echo model whose choices end where a test wants them, by a letter that is a stop string."""

from __future__ import annotations

import itertools

from engine.echo import echo_token

PROMPT_TOKENS = len("Once upon a time")
"""Of the site's jobs."""


def lengths(seed: int, stop: str, count: int) -> list[int]:
    """How many tokens each of the first choices has, the stop string's included."""
    return [
        next(n for n in itertools.count(1) if echo_token(seed, PROMPT_TOKENS + n - 1, choice=choice) == ord(stop))
        for choice in range(count)
    ]


def seed_with(stop: str, *bounds: tuple[int, int]) -> int:
    """A seed of which each choice has at least and at most so many."""

    def fits(seed: int) -> bool:
        return all(
            least <= n <= most for n, (least, most) in zip(lengths(seed, stop, len(bounds)), bounds, strict=True)
        )

    return next(seed for seed in itertools.count(1) if fits(seed))
