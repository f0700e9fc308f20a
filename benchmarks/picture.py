"""The benchmark of policies as a picture: waiting by policy, and slots over time under three kinds of batching."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.slots import draw_lengths

WIDTH, HEIGHT = 960, 470
INK, MUTED = "#222222", "#888888"
COLOURS = {"paid": "#1b6ca8", "light": "#e07b39", "heavy": "#9aa5b1"}
SLOTS, REQUESTS = 4, 16
Bar = tuple[int, int, int]
"""Slot, first and last step of a request."""


def draw(rows: Mapping[str, Mapping[str, float]]) -> str:
    """An SVG of the table's rows: p99 time to the first token on a logarithmic axis, and the Gantts below."""
    parts = [_text(20, 28, "99 % of first tokens come within … (s, logarithmic)", size=15)]
    parts += _waits(rows)
    lengths = [max(1, length // 25) for length in draw_lengths()[:REQUESTS]]
    gantts = {"static": static(lengths), "dynamic": dynamic(lengths), "continuous": continuous(lengths)}
    steps = max(end for bars in gantts.values() for _, _, end in bars)
    for number, (name, bars) in enumerate(gantts.items()):
        parts += _gantt(20 + number * 310, 300, name, bars, scale=270 / steps)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def static(lengths: Sequence[int]) -> list[Bar]:
    """A batch begins when the one before has ended as a whole."""
    bars, start = [], 0
    for first in range(0, len(lengths), SLOTS):
        batch = lengths[first : first + SLOTS]
        bars += [(slot, start, start + length) for slot, length in enumerate(batch)]
        start += max(batch)
    return bars


def dynamic(lengths: Sequence[int]) -> list[Bar]:
    """As static, but a batch is what has come by then: here one request every two steps."""
    bars, start, first = [], 0, 0
    while first < len(lengths):
        count = min(SLOTS, max(1, start // 2 + 1 - first), len(lengths) - first)
        batch = lengths[first : first + count]
        bars += [(slot, start, start + length) for slot, length in enumerate(batch)]
        start, first = start + max(batch), first + count
    return bars


def continuous(lengths: Sequence[int]) -> list[Bar]:
    """A slot is given on as soon as it is free."""
    bars, free_at = [], [0] * SLOTS
    for length in lengths:
        slot = free_at.index(min(free_at))
        bars.append((slot, free_at[slot], free_at[slot] + length))
        free_at[slot] += length
    return bars


def _waits(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    low, high = -2.0, 3.0  # 10 ms to 1000 s
    left, width = 130, 760

    def x(seconds: float) -> float:
        return left + width * (min(max(math.log10(seconds), low), high) - low) / (high - low)

    parts = []
    for power in range(int(low), int(high) + 1):
        parts.append(f'<line x1="{x(10**power):.0f}" y1="45" x2="{x(10**power):.0f}" y2="235" stroke="#dddddd"/>')
        parts.append(_text(x(10**power), 252, f"{10.0**power:g}", size=11, anchor="middle", colour=MUTED))
    for line, (name, row) in enumerate(rows.items()):
        y = 60 + 32 * line
        parts.append(_text(20, y + 4, name, size=13))
        for above, (who, colour) in zip((-7, 0, 7), COLOURS.items(), strict=True):  # equals side by side, not hidden
            parts.append(f'<circle cx="{x(row[f"{who}_p99_s"]):.1f}" cy="{y + above}" r="5" fill="{colour}"/>')
    for number, (who, colour) in enumerate(COLOURS.items()):
        parts.append(f'<circle cx="{560 + 110 * number}" cy="23" r="6" fill="{colour}"/>')
        parts.append(_text(572 + 110 * number, 28, who, size=13))
    return parts


def _gantt(left: int, top: int, name: str, bars: Sequence[Bar], *, scale: float) -> list[str]:
    end = max(last for _, _, last in bars)
    used = sum(last - first for _, first, last in bars) / (SLOTS * end)
    parts = [_text(left, top, f"{name}: {end} steps, {used:.0%} of the slots", size=13)]
    for number, (slot, first, last) in enumerate(bars):
        shade = ("#1b6ca8", "#5aa9d6", "#e07b39", "#f2b27a")[number % 4]
        parts.append(
            f'<rect x="{left + first * scale:.1f}" y="{top + 12 + 28 * slot}" width="{(last - first) * scale - 1:.1f}" '
            f'height="24" fill="{shade}"/>'
        )
    parts.append(_text(left, top + 140, "slots ↓  steps →", size=11, colour=MUTED))
    return parts


def _text(x: float, y: float, content: str, *, size: int, anchor: str = "start", colour: str = INK) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(content)}</text>"
    )
