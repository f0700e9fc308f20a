"""JSON objects as we take them from outside: in a request's body, in a line of a file.

Stricter than the json module: bounded, UTF-8 alone, each key once, finite numbers, and only characters that every
later part can hold.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from app.errors import InvalidRequest, MalformedBody, PayloadTooLarge

MAX_DEPTH = 32
"""Levels of arrays and objects."""
_MAX_DIGITS = 20
"""Of an integer: more than 64 bits need. Python's own parser takes quadratic time for long ones."""
_MAX_SEGMENT = 64
"""Characters of a key that a field's path repeats."""

# A string (closed or not) or a bracket. Possessive: an unclosed string is read once, not again from each quote in it.
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
"""What Postgres and UTF-8 refuse: NUL and lone surrogates."""
_SUSPECT = re.compile(r"\\u|[0-9][eE]|[0-9]{21}|NaN|Infinity")
"""Without one of these a JSON text holds nothing unholdable; to walk through it takes as long as to parse it."""


class Body(BaseModel):
    """Unknown fields are refused, and nothing is converted: true is no integer, "5" no number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def text_or_list(value: Any) -> str | None:
    """Which member of a union of a string and a list the client meant."""
    match value:
        case str():
            return "text"
        case list() | tuple():
            return "list"
    return None


def parse_object(raw: bytes, *, max_bytes: int) -> dict[str, Any]:
    """The JSON object that raw spells.

    Raises PayloadTooLarge, MalformedBody where it is no such thing, and InvalidRequest, with the field, where a value
    in it cannot be held.
    """
    if len(raw) > max_bytes:
        raise PayloadTooLarge(f"The body is larger than {max_bytes} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedBody(f"The body is not UTF-8: byte {error.start} is wrong") from None
    if text.startswith("\ufeff"):
        raise MalformedBody("The body starts with a byte order mark: send UTF-8 without one")
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise MalformedBody(f"The body is nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_integer, parse_constant=lambda _: math.nan)
    except ValueError as error:
        raise MalformedBody(f"The body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise MalformedBody("The body must be a JSON object")
    if _SUSPECT.search(text):
        _refuse_unholdable(value)
    return value


def fingerprint(body: dict[str, Any]) -> bytes:
    """SHA-256 of the object's canonical spelling: the same for any order of keys and any white space."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()


def field_path(location: tuple[str | int, ...]) -> str:
    """A field's path as clients write it: ("messages", 0, "content") → messages[0].content."""
    path = ""
    for segment in location:
        if isinstance(segment, int):
            path += f"[{segment}]"
        else:
            name = segment if len(segment) <= _MAX_SEGMENT else f"{segment[:_MAX_SEGMENT]}…"
            path += f".{name}" if path else name
    return path


def _depth(text: str) -> int:
    """The deepest level of brackets, counted without recursion before the recursive parser sees them."""
    depth = deepest = 0
    for match in _STRUCTURE.finditer(text):
        match match[0]:
            case "[" | "{":
                depth += 1
                deepest = max(deepest, depth)
            case "]" | "}":
                depth -= 1
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        path = field_path((_escaped(twice),))
        raise MalformedBody(f"The key '{path}' stands twice in one object", param=path)
    return value


def _integer(digits: str) -> int | float:
    """The integer; one that is too long becomes infinite, and is then refused by the name of its field."""
    return int(digits) if len(digits) <= _MAX_DIGITS else math.inf


def _refuse_unholdable(body: dict[str, Any]) -> None:
    for location, value in _leaves(body, ()):
        if isinstance(value, float) and not math.isfinite(value):
            path = field_path(location)
            raise InvalidRequest(f"{path}: a number must be finite and of at most {_MAX_DIGITS} digits", param=path)
        if isinstance(value, str) and (found := _UNSTORABLE.search(value)):
            path = field_path(tuple(_escaped(segment) for segment in location))
            raise InvalidRequest(f"{path}: the character U+{ord(found[0]):04X} is not allowed", param=path)


def _leaves(value: Any, location: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Each number, string and key in value, with where it stands."""
    match value:
        case dict():
            for key, inner in value.items():
                yield (*location, key), key
                yield from _leaves(inner, (*location, key))
        case list():
            for position, inner in enumerate(value):
                yield from _leaves(inner, (*location, position))
        case _:
            yield location, value


def _escaped(segment: str | int) -> str | int:
    """A key whose characters are not all allowed, in a spelling that is."""
    if isinstance(segment, int):
        return segment
    return _UNSTORABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), segment)
