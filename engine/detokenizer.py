"""Token ids to text, piece by piece: the joined pieces are what decoding all ids at once gives, for every cut.

Two kinds of tokenizer are known. Byte-level ones (GPT-2's kind: Llama 3, Qwen, SmolLM) map each token to bytes, and
the text is those bytes as UTF-8. The SentencePiece kind (Llama 2, Mistral) maps tokens to text, with single bytes
written <0xE2>, and its first token may lose a leading space.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer


def _byte_alphabet() -> str:
    """The character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 stands for itself, the other 68 bytes are moved behind it: 0x00 is "Ā", the space is "Ġ".
    Source: GPT-2's encoder.py, bytes_to_unicode.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(moved)) for byte in range(256))


BYTE_ALPHABET = _byte_alphabet()
"""Position b holds the character that byte b has in a byte-level vocabulary."""

_BYTE_OF = {character: byte for byte, character in enumerate(BYTE_ALPHABET)}
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_MAX_WINDOW = 12
"""Tokens decoded together before the older ones are let go; a window is decoded once per token."""
_CONTEXT = 4
"""Tokens kept when a window is cut, so that the next one is not taken for the first of the text."""


class TextStream(Protocol):
    """The text of one growing line of tokens."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens decide: never half a character. Special and unknown ids add none."""

    def flush(self) -> str:
        """The rest, half characters as U+FFFD, now that no more tokens come."""


class Detokenizer:
    """Opens text streams over one tokenizer; shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError, naming it, for a decoder that is of neither known kind."""
        kinds = _decoder_kinds(tokenizer)
        special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        tokens = {
            token_id: token
            for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()
            if token_id not in special
        }
        self._tokenizer = tokenizer
        self._bytes_of: dict[int, bytes] | None = None
        self._is_byte: dict[int, bool] = {}
        if kinds == ["ByteLevel"]:
            self._bytes_of = {token_id: _token_bytes(token) for token_id, token in tokens.items()}
        elif kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            has_bytes = "ByteFallback" in kinds
            self._is_byte = {i: has_bytes and bool(_BYTE_TOKEN.fullmatch(token)) for i, token in tokens.items()}
        else:
            raise ValueError(f"tokenizers with the decoder {' + '.join(kinds) or 'none'} are not supported")

    @classmethod
    def load(cls, model_dir: Path) -> Detokenizer:
        """The detokenizer of a model directory's tokenizer.json."""
        return cls(Tokenizer.from_file(str(model_dir / "tokenizer.json")))

    def stream(self) -> TextStream:
        if self._bytes_of is not None:
            return _ByteStream(self._bytes_of)
        return _WindowStream(self._tokenizer, self._is_byte)


class _ByteStream:
    """Byte-level: a table look-up per token and one incremental UTF-8 decoder."""

    def __init__(self, bytes_of: dict[int, bytes]) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join([self._bytes_of.get(token_id, b"") for token_id in token_ids]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """SentencePiece kind: decodes a window of the last tokens and shows what it adds to the one before.

    A run of byte tokens is one unit: the decoder makes characters of all of them or of none, so nothing of a run is
    shown before it ends.
    """

    def __init__(self, tokenizer: Tokenizer, is_byte: dict[int, bool]) -> None:
        self._tokenizer = tokenizer
        self._is_byte = is_byte  # for each id that has text: is it a byte token?
        self._window: list[int] = []
        self._shown_length = 0  # characters of the window's text that were shown

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        return self._show()

    def _push_one(self, token_id: int) -> str:
        is_byte = self._is_byte.get(token_id)
        if is_byte is None:
            return ""
        self._window.append(token_id)
        if is_byte:
            return ""
        text = self._show()
        if len(self._window) > _MAX_WINDOW:
            self._cut_window()
        return text

    def _show(self) -> str:
        text = self._decode(self._window)
        shown, self._shown_length = self._shown_length, len(text)
        return text[shown:]

    def _cut_window(self) -> None:
        context = self._window[-_CONTEXT:]
        # An empty context would make the next token the first, which loses its leading space.
        if text := self._decode(context):
            self._window, self._shown_length = context, len(text)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def _token_bytes(token: str) -> bytes:
    """A byte-level token's bytes; one with characters outside the alphabet (an added token) is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """The decoder's steps by name, in their order."""
    decoder: dict[str, Any] | None = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return []
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps]
