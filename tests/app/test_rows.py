"""Lines of a batch's input file, and the rows in them."""

from __future__ import annotations

import io
import json

import pytest

from app.errors import Refusal
from app.grammars import Grammars
from app.models import Model
from app.prompts import Prompts
from app.rows import Desk, Line, count_rows, encoded, read_lines, row_of
from app.settings import Settings
from app.tiers import Tier

ENDPOINT = "/v1/completions"


def lines(data: bytes, *, start: int = 0, number: int = 0, max_bytes: int = 100) -> list[Line]:
    return list(read_lines(io.BytesIO(data), start=start, number=number, max_bytes=max_bytes))


def contents(data: bytes) -> list[bytes | None]:
    return [line.content for line in lines(data)]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"a\n\nb\n \t\r\n", [b"a", b"", b"b", b" \t"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", [b"a", b"\xef\xbb\xbfb"]),  # a byte order mark belongs to the start alone
        ("a\u2028b\u2029c\u0085d\x0b\x0ce\n".encode(), ["a\u2028b\u2029c\u0085d\x0b\x0ce".encode()]),
        (b"a\rb\n", [b"a\rb"]),
    ],
)
def test_lines_end_at_lf_alone(data: bytes, found: list[bytes]) -> None:
    assert contents(data) == found


def test_a_long_line_is_passed_over_without_being_held() -> None:
    data = b"a\n" + b"x" * 300_000 + b"\nb\n"
    long = lines(data, max_bytes=100)
    assert [(line.number, line.content) for line in long] == [(1, b"a"), (2, None), (3, b"b")]
    assert [line.end for line in long] == [2, 300_003, 300_005]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_line_of_exactly_the_longest_length_is_taken(end: bytes) -> None:
    assert contents(b"x" * 100 + end) == [b"x" * 100]
    assert contents(b"x" * 101 + end) == [None]


def test_reading_goes_on_where_it_stopped() -> None:
    data = b"\xef\xbb\xbfa\r\n\nbb\nc"
    whole = lines(data)
    for line in whole:
        assert lines(data, start=line.end, number=line.number) == whole[line.number :]


def test_rows_are_the_lines_that_are_not_blank() -> None:
    content = b"\xef\xbb\xbf\n{}\r\n   \n\r\n{}\n" + b" " * 200_000 + b"\nx"
    assert count_rows(io.BytesIO(content), most=10) == 3
    assert count_rows(io.BytesIO(content), most=2) == 2


# ---- rows


def row(**changes: object) -> bytes:
    fields = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"prompt": "hi"}} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


@pytest.fixture(scope="module")
def desk(settings: Settings, model: Model) -> Desk:
    return Desk(settings, model, Prompts(model), Grammars(model))


def refusal_of(desk: Desk, content: bytes | None, endpoint: str = ENDPOINT) -> tuple[str | None, str]:
    """The custom_id and the message of a row that cannot run."""
    read = row_of(Line(7, 0, content, is_blank=False), endpoint=endpoint, max_bytes=10_000)
    with pytest.raises(Refusal) as refusal:
        desk.submission_of(read, endpoint)
    return read.custom_id, refusal.value.message


def test_a_good_row_becomes_a_bulk_submission(desk: Desk) -> None:
    read = row_of(Line(7, 0, row(), is_blank=False), endpoint=ENDPOINT, max_bytes=10_000)
    submission = desk.submission_of(read, ENDPOINT)
    assert (submission.tier, submission.row_number, submission.custom_id) == (Tier.BULK, 7, "a")
    assert submission.prompt_ids == desk.prompts.of_text("hi")


def test_a_chat_row_is_rendered(desk: Desk) -> None:
    messages = [{"role": "user", "content": "hi"}]
    content = row(url="/v1/chat/completions", body={"messages": messages, "max_completion_tokens": 3, "n": 1})
    read = row_of(Line(1, 0, content, is_blank=False), endpoint="/v1/chat/completions", max_bytes=10_000)
    submission = desk.submission_of(read, "/v1/chat/completions")
    assert submission.prompt_ids == desk.prompts.of_messages(messages)
    assert submission.sampling["max_tokens"] == 3


@pytest.mark.parametrize(
    ("content", "custom_id", "names"),
    [
        (None, None, "longer than 10000 bytes"),
        (b"{", None, "JSON"),
        (b"[]", None, "object"),
        (b'"x"', None, "object"),
        (b"\xff", None, "UTF-8"),
        (b"[" * 5_000, None, "nested"),
        (b'{"custom_id":"a","custom_id":"b"}', None, "custom_id"),
        (row(custom_id=...), None, "custom_id"),
        (row(custom_id=5), None, "custom_id"),
        (row(custom_id=""), None, "custom_id"),
        (row(custom_id="x" * 513), None, "custom_id"),
        (row(custom_id="\0"), None, "custom_id"),
        (row(custom_id="\ud800"), None, "custom_id"),
        (row(method="GET"), "a", "method"),
        (row(method=...), "a", "method"),
        (row(url="/v1/chat/completions"), "a", "url"),
        (row(url=...), "a", "url"),
        (row(body=...), "a", "body"),
        (row(body=[]), "a", "body"),
        (row(extra=1), "a", "extra"),
        (row(body={}), "a", "prompt"),
        (row(body={"prompt": ""}), "a", "prompt"),
        (row(body={"prompt": "a\0b"}), "a", "body.prompt"),
        (row(body={"prompt": "\ud800"}), "a", "body.prompt"),
        (row(body={"prompt": "hi", "temperature": 3}), "a", "temperature"),
        (row(body={"prompt": "hi", "max_tokens": 0}), "a", "max_tokens"),
        (row(body={"prompt": "hi", "max_tokens": True}), "a", "max_tokens"),
        (row(body={"prompt": "hi", "stream": True}), "a", "stream"),
        (row(body={"prompt": "hi", "n": 9}), "a", "n:"),
        (row(body={"prompt": "hi", "model": "gpt-99"}), "a", "model"),
        (row(body={"prompt": "hi", "webhook": {"url": "https://a.b"}}), "a", "webhook"),
        (row(body={"prompt": "x" * 9_000}), "a", "prompt"),
        (row(body={"prompt": "hi"}).replace(b'"hi"', b'"hi", "seed": NaN'), "a", "seed"),
        (row(body={"prompt": "hi"}).replace(b'"hi"', b'"hi", "seed": ' + b"1" * 5_000), "a", "seed"),
    ],
)
def test_a_bad_row_names_its_field_and_keeps_its_custom_id(
    desk: Desk, content: bytes | None, custom_id: str | None, names: str
) -> None:
    assert refusal_of(desk, content)[0] == custom_id
    assert names in refusal_of(desk, content)[1]


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"prompt": "hi", "max_tokens": 0}, "max_tokens", "body.max_tokens: input should"),
        ({"prompt": "hi", "max_tokens": 9_000}, "max_tokens", "body.max_tokens may be at most 8190"),
        ({"prompt": "hi", "max_tokens": 10**30}, "max_tokens", "body.max_tokens: a number must be finite"),
        ({"prompt": ""}, "prompt", "body.prompt must not be empty"),
        ({"prompt": [1, 999]}, "prompt[1]", "body.prompt[1] is 999"),
        ({}, "prompt", "body.prompt is missing"),
        ({"prompt": "hi", "foo": 1}, "foo", "There is no field 'body.foo'"),
        ({"prompt": "hi", "model": "gpt-5"}, "model", "There is no model 'gpt-5'"),
        ({"prompt": "hi", "service_tier": "gold"}, "service_tier", "body.service_tier must be one of"),
    ],
)
def test_every_wrong_field_of_a_body_is_named_as_one_of_the_row(
    desk: Desk, body: dict[str, object], field: str, message: str
) -> None:
    read = row_of(Line(7, 0, row(body=body), is_blank=False), endpoint=ENDPOINT, max_bytes=10_000)
    with pytest.raises(Refusal) as refusal:
        desk.submission_of(read, ENDPOINT)
    assert refusal.value.param == f"body.{field}"
    assert refusal.value.message.startswith(message)


def test_lines_are_ascii_so_that_no_reader_splits_them() -> None:
    line = {"text": "a\u2028b\u0085c\0d\n\U0001f600"}
    assert encoded(line).isascii()
    assert encoded(line).splitlines() == [encoded(line).rstrip(b"\n")]
    assert json.loads(encoded(line)) == line
