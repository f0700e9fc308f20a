"""JSON objects from outside: what is taken, what is refused, and that neither takes long."""

from __future__ import annotations

import time

import pytest

from app.bodies import MAX_DEPTH, field_path, fingerprint, parse_object
from app.errors import InvalidRequest, MalformedBody, PayloadTooLarge


def parse(raw: bytes) -> dict[str, object]:
    return parse_object(raw, max_bytes=2_000_000)


def test_an_object_comes_out_as_it_was_spelled() -> None:
    raw = '{"a": [1, -2.5, true, null, "ü\\ud83d\\ude00\\ufffe"], "b": {"c": {}}}'.encode()
    assert parse(raw) == {"a": [1, -2.5, True, None, "ü\U0001f600\ufffe"], "b": {"c": {}}}


def test_depth_counts_brackets_outside_strings() -> None:
    inside = b'{"a": "' + b"[{" * 1000 + b'\\"[[[["}'
    assert parse(inside)
    deepest = MAX_DEPTH - 1  # the object itself is one level
    assert parse(b'{"a": ' + b"[" * deepest + b"]" * deepest + b"}")
    with pytest.raises(MalformedBody, match="nested deeper"):
        parse(b'{"a": ' + b"[" * (deepest + 1) + b"]" * (deepest + 1) + b"}")


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": "' + b'\\"' * 900_000,  # an unclosed string full of quotes
        b'{"a": ' + b"9" * 1_900_000 + b"}",
        b'{"a": ' + b"[" * 1_900_000,
        b"{" + b'"a": ' * 300_000,
    ],
    ids=["quotes", "digits", "brackets", "keys"],
)
def test_a_hostile_body_takes_no_longer_than_a_large_one(raw: bytes) -> None:
    """Each took minutes, or the whole stack, with a naive scan; the bound is a hundred times what it takes."""
    started = time.process_time()
    with pytest.raises((MalformedBody, InvalidRequest)):
        parse(raw)
    assert time.process_time() - started < 10


def test_the_size_is_bounded_in_bytes() -> None:
    assert parse_object(b'{"a":1}', max_bytes=7)
    with pytest.raises(PayloadTooLarge):
        parse_object(b'{"a":12}', max_bytes=7)


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b'{"a": {"b": [0, NaN]}}', "a.b[1]"),
        (b'{"a": {"b": [0, 1e999]}}', "a.b[1]"),
        (b'{"a": [{"b": 123456789012345678901}]}', "a[0].b"),
        (b'{"a": ["x", "\\u0000"]}', "a[1]"),
        (b'{"a": {"\\u0000": 1}}', "a.\\x00"),
        (b'{"a": "\\udfff"}', "a"),
    ],
)
def test_a_value_that_cannot_be_held_is_refused_by_its_path(raw: bytes, path: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse(raw)
    assert refusal.value.param == path


@pytest.mark.parametrize(
    ("key", "path"), [("\\u0000", "\\x00"), ("\\ud800", "\\ud800"), ("a\\u0000ü", "a\\x00ü"), ("ü", "ü")]
)
def test_a_key_that_stands_twice_is_named_in_a_spelling_that_can_be_held(key: str, path: str) -> None:
    with pytest.raises(MalformedBody) as refusal:
        parse(f'{{"{key}":1,"{key}":2}}'.encode())
    assert refusal.value.param == path
    assert refusal.value.message == f"The key '{path}' stands twice in one object"


@pytest.mark.parametrize(
    ("location", "path"),
    [
        (("a",), "a"),
        (("messages", 0, "content"), "messages[0].content"),
        (("a", 1, 2, "b"), "a[1][2].b"),
        (("k" * 70,), "k" * 64 + "…"),
        ((), ""),
    ],
)
def test_a_path_is_written_as_clients_write_it(location: tuple[str | int, ...], path: str) -> None:
    assert field_path(location) == path


def test_a_fingerprint_knows_no_order_and_no_spaces() -> None:
    same = [parse(raw) for raw in (b'{"a":1,"b":{"c":2,"d":[3,4]}}', b'{ "b": {"d": [3, 4], "c": 2}, "a": 1 }')]
    assert fingerprint(same[0]) == fingerprint(same[1])
    for other in (b'{"a":1}', b'{"a":1,"b":{"c":2,"d":[4,3]}}', b'{"a":1.0,"b":{"c":2,"d":[3,4]}}'):
        assert fingerprint(parse(other)) != fingerprint(same[0])
