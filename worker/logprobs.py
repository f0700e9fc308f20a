"""The engine's logprobs, spelled: tokens by their bytes, where the engine has their ids."""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from app import logprobs
from engine.detokenizer import BYTE_ALPHABET
from engine.request import TokenLogprob

LEAST = -9999.0
"""Stands for what JSON cannot say: the logarithm of nothing, of a token that was ruled out. OpenAI's own number."""
DIGITS = 6
"""Kept behind the point: about what single precision has."""

_BYTE_OF = {character: byte for byte, character in enumerate(BYTE_ALPHABET)}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Speller:
    """Knows the bytes of one tokenizer's tokens. It reads the tokenizer once somebody asks: most workers need none."""

    def __init__(self, model_dir: Path) -> None:
        self._path = model_dir / "tokenizer.json"
        self._known: dict[int, bytes] = {}

    def spelled(self, logprob: TokenLogprob) -> logprobs.TokenLogprob:
        return logprobs.TokenLogprob(
            self.bytes_of(logprob.token_id),
            _number(logprob.logprob),
            tuple((self.bytes_of(token_id), _number(its)) for token_id, its in logprob.top),
        )

    def bytes_of(self, token_id: int) -> bytes:
        """A token's bytes; a special token's are its name's, and none those of an id that the tokenizer does not know.

        The same two kinds of tokenizer are known as the engine's detokenizer knows.
        """
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF[character] for character in token)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._path))

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in str(json.loads(self._tokenizer.decoder.__getstate__()))


def _number(logprob: float) -> float:
    return max(LEAST, round(logprob, DIGITS))
