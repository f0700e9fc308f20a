"""Logprobs: how likely a token was, as events keep it, and in OpenAI's two shapes."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Likely = tuple[bytes, float]
"""A token's bytes, and the natural logarithm of its probability."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token, how likely it was, and the likeliest ones at its place."""

    token: bytes
    logprob: float
    top: tuple[Likely, ...] = ()
    """The likeliest first."""


def pack(logprobs: Iterable[TokenLogprob]) -> bytes:
    """As an event keeps them: tokens by their bytes, not ids, for a job may outlive its model on this server."""
    entries = [
        [_text_of(each.token), each.logprob, [[_text_of(token), logprob] for token, logprob in each.top]]
        for each in logprobs
    ]
    return json.dumps(entries, separators=(",", ":")).encode()


def unpack(packed: bytes) -> list[TokenLogprob]:
    return [
        TokenLogprob(_bytes_of(token), logprob, tuple((_bytes_of(other), its) for other, its in top))
        for token, logprob, top in json.loads(packed)
    ]


def _text_of(token: bytes) -> str:
    """Any bytes as text that JSON can carry, a character for each."""
    return token.decode("latin-1")


def _bytes_of(text: str) -> bytes:
    return text.encode("latin-1")


# ---- OpenAI's shapes


def chat_shape(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """As chat completions have them: {"content": [{token, logprob, bytes, top_logprobs}]}."""
    return {
        "content": [
            _entry(each.token, each.logprob) | {"top_logprobs": [_entry(token, its) for token, its in each.top]}
            for each in logprobs
        ]
    }


def _entry(token: bytes, logprob: float) -> dict[str, Any]:
    """Half a character is U+FFFD in its token; the bytes tell which half."""
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}


def of_chat_shape(shape: Mapping[str, Any]) -> list[TokenLogprob]:
    """What chat_shape was made of."""
    return [
        TokenLogprob(
            bytes(entry["bytes"]),
            entry["logprob"],
            tuple((bytes(other["bytes"]), other["logprob"]) for other in entry["top_logprobs"]),
        )
        for entry in shape["content"]
    ]


def completion_shape(logprobs: Sequence[TokenLogprob], *, start: int = 0) -> dict[str, Any]:
    """As completions have them: lists that run in parallel, and of each token where in the text, which starts there,
    it starts.

    top_logprobs always have the token itself, also where it is none of the likeliest.
    """
    offsets, length, utf8 = [], start, codecs.getincrementaldecoder("utf-8")("replace")
    for each in logprobs:
        offsets.append(length)
        length += len(utf8.decode(each.token))
    return {
        "tokens": [_name(each.token) for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [
            {_name(token): its for token, its in (*each.top, (each.token, each.logprob))} for each in logprobs
        ],
        "text_offset": offsets,
    }


def _name(token: bytes) -> str:
    """A token by its text, or by its bytes where these are no text: as keys, all halves of characters must differ."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
