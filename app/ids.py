"""Ids: a prefix that names the kind, then 128 bits that sort by time and cannot be guessed."""

from __future__ import annotations

import re
import secrets
import time


def new_id(prefix: str) -> str:
    """For instance job_0199b1c2d3e4f5…: 48 bits of Unix milliseconds, then 80 random bits, in hexadecimal."""
    return f"{prefix}_{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def is_id(prefix: str, text: str) -> bool:
    """Whether it can be one of that kind at all."""
    return re.fullmatch(rf"{prefix}_[0-9a-f]{{32}}", text) is not None
