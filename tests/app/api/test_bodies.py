"""Bad bodies of POST /v1/jobs: each is refused with a status and the field, and none is a 500."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

LIMIT = 1_000_000


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hi", **fields}).encode()


def chat(*messages: Any) -> bytes:
    return json.dumps({"messages": messages}).encode()


def raw(field: str, value: str) -> bytes:
    return f'{{"prompt": "hi", "{field}": {value}}}'.encode()


MALFORMED = {
    "empty": b"",
    "spaces": b"  ",
    "null": b"null",
    "array": b"[]",
    "string": b'"hi"',
    "number": b"5",
    "cut off": b'{"prompt": "hi"',
    "trailing comma": b'{"prompt": "hi",}',
    "two values": b'{"prompt": "hi"} {}',
    "single quotes": b"{'prompt': 'hi'}",
    "a form": b"prompt=hi",
    "UTF-16": '{"prompt": "hi"}'.encode("utf-16"),
    "UTF-16 without BOM": '{"prompt": "hi"}'.encode("utf-16-le"),
    "byte order mark": b'\xef\xbb\xbf{"prompt": "hi"}',
    "wrong UTF-8": b'{"prompt": "\xff"}',
    "a surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "a raw newline in a string": b'{"prompt": "a\nb"}',
    "deep array": b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    "deep object": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "very deep": b"[" * 900_000,
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_json_object_is_a_400(call: Any, content: bytes) -> None:
    answer = call("POST", "/v1/jobs", data=content)
    assert (answer.status_code, answer.get_json()["error"]["code"]) == (400, "malformed_body")


def test_a_key_that_stands_twice_is_a_400_that_names_it(call: Any) -> None:
    answer = call("POST", "/v1/jobs", data=b'{"prompt": "a", "seed": 1, "prompt": "b"}')
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, "prompt")


WRONG = [
    # prompt and messages
    (b"{}", "prompt"),
    (body(messages=[{"role": "user", "content": "hi"}]), "prompt"),
    (body(prompt=None), "prompt"),
    (body(prompt=""), "prompt"),
    (body(prompt=5), "prompt"),
    (body(prompt=True), "prompt"),
    (body(prompt={}), "prompt"),
    (body(prompt=[]), "prompt"),
    (body(prompt=["hi"]), "prompt[0]"),
    (body(prompt=[1, True]), "prompt[1]"),
    (body(prompt=[1, 2.0]), "prompt[1]"),
    (body(prompt=[1, -1]), "prompt[1]"),
    (body(prompt=[1, 259]), "prompt[1]"),  # the echo model has 259 tokens
    (body(prompt=[2**64]), "prompt[0]"),
    (body(prompt="a\0b"), "prompt"),
    (body(prompt="\ud800"), "prompt"),
    (body(prompt="\udc00\ud800"), "prompt"),
    (body(prompt="x" * 8192), "prompt"),  # the echo model's context, without room for a token
    (body(prompt=[1] * 8192), "prompt"),
    (body(prompt="x" * 900_000), "prompt"),
    (chat(), "messages"),
    (chat("hi"), "messages[0]"),
    (chat({"role": "user"}), "messages[0].content"),
    (chat({"content": "hi"}), "messages[0].role"),
    (chat({"role": "user", "content": "hi"}, {"role": "tool", "content": "hi"}), "messages[1].role"),
    (chat({"role": "user", "content": 5}), "messages[0].content"),
    (chat({"role": "user", "content": None}), "messages[0].content"),
    (chat({"role": "user", "content": "\0"}), "messages[0].content"),
    (chat({"role": "user", "content": "hi", "name": "x"}), "messages[0].name"),
    (chat({"role": "user", "content": "x" * 8192}), "messages"),
    # max_tokens
    (body(max_tokens=0), "max_tokens"),
    (body(max_tokens=-1), "max_tokens"),
    (body(max_tokens=8191), "max_tokens"),  # with two of the prompt one more than 8192
    (body(max_tokens=10**12), "max_tokens"),
    (body(max_tokens=2**64), "max_tokens"),
    (body(max_tokens=True), "max_tokens"),
    (body(max_tokens="5"), "max_tokens"),
    (body(max_tokens=5.0), "max_tokens"),
    (raw("max_tokens", "9" * 5000), "max_tokens"),
    (raw("max_tokens", "-" + "9" * 5000), "max_tokens"),
    # temperature, top_p, top_k
    (body(temperature=-0.1), "temperature"),
    (body(temperature=2.1), "temperature"),
    (body(temperature=1e9), "temperature"),
    (body(temperature="1"), "temperature"),
    (body(temperature=True), "temperature"),
    (raw("temperature", "NaN"), "temperature"),
    (raw("temperature", "Infinity"), "temperature"),
    (raw("temperature", "-Infinity"), "temperature"),
    (raw("temperature", "1e999"), "temperature"),
    (body(top_p=0), "top_p"),
    (body(top_p=1.01), "top_p"),
    (raw("top_p", "NaN"), "top_p"),
    (body(top_k=-1), "top_k"),
    (body(top_k=1.5), "top_k"),
    (body(top_k=2**31), "top_k"),
    # seed
    (body(seed=-1), "seed"),
    (body(seed=2**63), "seed"),
    (body(seed=2**64), "seed"),
    (body(seed="7"), "seed"),
    # stop
    (body(stop=""), "stop"),
    (body(stop=["a", ""]), "stop[1]"),
    (body(stop=["a"] * 17), "stop"),
    (body(stop=["a"] * 1000), "stop"),
    (body(stop="x" * 257), "stop"),
    (body(stop=["x" * 10_000]), "stop[0]"),
    (body(stop=5), "stop"),
    (body(stop=[5]), "stop[0]"),
    (body(stop="\0"), "stop"),
    # the others
    (body(model=5), "model"),
    (body(ignore_eos=1), "ignore_eos"),
    (body(ignore_eos="yes"), "ignore_eos"),
    (body(service_tier="gold"), "service_tier"),
    (body(service_tier=1), "service_tier"),
    (body(metadata=[]), "metadata"),
    (body(metadata={"k": 1}), "metadata.k"),
    (body(metadata={"k": None}), "metadata.k"),
    (body(metadata={"k": {"nested": "x"}}), "metadata.k"),
    (body(metadata={"k": "\0"}), "metadata.k"),
    (body(metadata={"k": "v" * 513}), "metadata.k"),
    (body(metadata={str(n): "v" for n in range(17)}), "metadata"),
    (body(metadata={"k\0": "v"}), "metadata.k\\x00"),
    (body(metadata={"k" * 65: "v"}), "metadata." + "k" * 64 + "…"),
    (body(metadata={"": "v"}), "metadata."),
    (body(metadata={"~k": 1}), "metadata.~k"),
    (body(metadata={"[key]": 1}), "metadata.[key]"),
    (body(webhook="https://example.com"), "webhook"),
    (body(webhook={}), "webhook.url"),
    (body(webhook={"url": 5}), "webhook.url"),
    (body(webhook={"url": ""}), "webhook.url"),
    (body(webhook={"url": "http://example.com"}), "webhook.url"),
    (body(webhook={"url": "https://127.0.0.1/"}), "webhook.url"),
    (body(webhook={"url": "https://example.com", "secret": "x"}), "webhook.secret"),
    (body(deadline=0), "deadline"),
    (body(deadline=-5), "deadline"),
    (body(deadline="tomorrow"), "deadline"),
    (body(deadline=30 * 86_400 + 1), "deadline"),
    (raw("deadline", "NaN"), "deadline"),
    # fields that are not the client's to set
    *[(body(**{name: "x"}), name) for name in ("id", "status", "tier", "tenant_id", "priority", "attempt", "unknown")],
    *[(body(**{name: "x"}), name) for name in ("~foo", "[key]", "text")],
    (chat({"role": "user", "content": "hi", "~foo": 1}), "messages[0].~foo"),
    (body(n=9), "n"),
    (body(stream=True), "stream"),
    (b'{"prompt": "hi", "\\ud800": 1}', "\\ud800"),
    (b'{"prompt": "hi",' + b",".join(b'"k%d": 1' % n for n in range(80_000)) + b"}", "k0"),
]


@pytest.mark.parametrize(("content", "field"), WRONG)
def test_a_wrong_field_is_a_422_that_names_it(call: Any, content: bytes, field: str) -> None:
    answer = call("POST", "/v1/jobs", data=content)
    error = answer.get_json()["error"]
    assert (answer.status_code, error["param"]) == (422, field), error
    assert error["message"]
    assert len(answer.get_data()) < 2000  # no refusal sends the body back


def test_a_field_that_is_not_there_is_named_as_it_was_sent(call: Any) -> None:
    answer = call("POST", "/v1/jobs", data=body(**{"~foo": 1}))
    assert answer.get_json()["error"]["message"] == "There is no field '~foo'"


RIGHT = [
    body(prompt=" "),
    body(prompt="\ufffe\uffff\U0010ffff"),  # non-characters are characters
    body(prompt="\U0001f600"),  # as a pair of surrogates in JSON
    body(prompt="<|im_end|>"),
    body(prompt="مرحبا\u200b\u202e"),
    body(prompt=[0, 258]),
    body(prompt="x" * 8191, max_tokens=1),
    chat({"role": "system", "content": ""}, {"role": "user", "content": "{{ ''.__class__ }} <|im_start|>system"}),
    body(temperature=0, top_p=1, top_k=0, seed=0),
    body(temperature=1e-30, top_p=1e-9, top_k=2**31 - 1, seed=2**63 - 1),
    body(stop=" "),
    body(stop=[]),
    body(stop=["\U0001f600", "\n\n"]),
    body(model="echo", max_tokens=8190, deadline=0.5, ignore_eos=True),
    body(metadata={"k" * 64: "v" * 512}),
    body(model=None, max_tokens=None, temperature=None, stop=None, metadata=None, webhook=None, deadline=None),
]


@pytest.mark.parametrize("content", RIGHT)
def test_what_is_strange_and_right_is_taken(call: Any, content: bytes) -> None:
    answer = call("POST", "/v1/jobs", data=content)
    assert answer.status_code == 202, answer.get_json()


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/x-www-form-urlencoded", None])
def test_the_content_type_does_not_matter(call: Any, content_type: str | None) -> None:
    assert call("POST", "/v1/jobs", data=body(), content_type=content_type).status_code == 202


def test_an_unknown_model_is_a_404_that_names_the_field(call: Any) -> None:
    answer = call("POST", "/v1/jobs", data=body(model="gpt-5"))
    error = answer.get_json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "not_found", "model")


@pytest.mark.parametrize("declared", [True, False], ids=["with its length", "in chunks"])
def test_a_body_over_the_limit_is_a_413(call: Any, declared: bool) -> None:
    content = body(prompt="x" * LIMIT)
    options: dict[str, Any] = {"data": content}
    if not declared:
        options = {"input_stream": io.BytesIO(content), "environ_overrides": {"wsgi.input_terminated": True}}
    answer = call("POST", "/v1/jobs", **options)
    assert (answer.status_code, answer.get_json()["error"]["code"]) == (413, "payload_too_large")
    assert answer.content_type == "application/problem+json"


def test_no_refusal_repeats_the_prompt(call: Any, caplog: pytest.LogCaptureFixture) -> None:
    for content in (
        body(prompt="SECRET\0"),
        body(prompt="SECRET" * 2000),
        chat({"role": "user", "content": "SECRET\ud800"}),
    ):
        answer = call("POST", "/v1/jobs", data=content)
        assert answer.status_code == 422
        assert b"SECRET" not in answer.get_data()
    assert "SECRET" not in caplog.text
