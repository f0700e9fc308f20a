"""Logprobs as events keep them, and in OpenAI's shapes."""

from __future__ import annotations

from app.logprobs import TokenLogprob, chat_shape, completion_shape, pack, unpack

SMILE = "🙂".encode()
LOGPROBS = [
    TokenLogprob(b"a", -0.5, ((b"a", -0.5), (b"\0", -1.25))),
    TokenLogprob(SMILE[:2], -2.0, ((b" ", -0.25),)),
    TokenLogprob(SMILE[2:], -0.125),
    TokenLogprob(b"", -9999.0),
    TokenLogprob("é ".encode(), 0.0),
]


def test_what_is_kept_is_what_was_there_whatever_the_bytes() -> None:
    every_byte = [TokenLogprob(bytes(range(256)), -1.0, ((bytes(range(255, -1, -1)), -0.5),))]
    for logprobs in (LOGPROBS, every_byte, []):
        assert unpack(pack(logprobs)) == logprobs
        assert pack(logprobs).isascii()


def test_chats_have_an_object_for_each_token() -> None:
    content = chat_shape(LOGPROBS)["content"]
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "\0", "logprob": -1.25, "bytes": [0]},
        ],
    }
    assert [(entry["token"], entry["bytes"]) for entry in content[1:4]] == [
        ("\ufffd", list(SMILE[:2])),
        ("\ufffd\ufffd", list(SMILE[2:])),
        ("", []),
    ]


def test_completions_have_lists_that_run_in_parallel() -> None:
    assert completion_shape(LOGPROBS) == {
        "tokens": ["a", "bytes:\\xf0\\x9f", "bytes:\\x99\\x82", "", "é "],
        "token_logprobs": [-0.5, -2.0, -0.125, -9999.0, 0.0],
        "top_logprobs": [
            {"a": -0.5, "\0": -1.25},
            {" ": -0.25, "bytes:\\xf0\\x9f": -2.0},
            {"bytes:\\x99\\x82": -0.125},
            {"": -9999.0},
            {"é ": 0.0},
        ],
        "text_offset": [0, 1, 1, 2, 2],  # "a🙂é ": both halves of the smile start behind the "a"
    }
