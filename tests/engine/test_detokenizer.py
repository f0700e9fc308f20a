"""Text from tokens: the joined pieces are what decoding all ids at once gives, for every cut."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine.detokenizer import Detokenizer, _WindowStream
from engine.echo import write_model

TEXTS = [
    "plain words, and a line\nbreak",
    "naïve café: Zürich – ½ €",
    "日本語と한국어 and 中文",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪🇫🇷 ❤️",
    "\ufffd stays \ufffd\ufffd itself",
    "𝔊𝔬𝔱𝔥𝔦𝔠 𐍈",
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The echo model's: one token per byte, so every character beyond ASCII is split."""
    model_dir = tmp_path_factory.mktemp("echo")
    write_model(model_dir)
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """Llama 2's kind: pieces with ▁ for the space, and single bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁cat", "s", "at", "▁▁", "é", "日本", "\n", "\ufffd"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def pieces_of(detokenizer: Detokenizer, *cuts: list[int]) -> list[str]:
    """What each group of tokens shows, and last what the end shows."""
    stream = detokenizer.stream()
    return [*(stream.push(token_ids) for token_ids in cuts), stream.flush()]


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id: int | None = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


@pytest.mark.parametrize("text", TEXTS)
def test_every_cut_joins_to_the_text(byte_level: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(byte_level)
    token_ids = list(text.encode())
    for cut in range(len(token_ids) + 1):
        shown, *rest = pieces_of(detokenizer, token_ids[:cut], token_ids[cut:])
        assert shown + "".join(rest) == text
        assert text.startswith(shown), "half a character was shown"


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_is_shown_with_its_last_byte(byte_level: Tokenizer, text: str) -> None:
    stream = Detokenizer(byte_level).stream()
    for character in text:
        *first, last = character.encode()
        assert [stream.push([byte]) for byte in first] == [""] * len(first)
        assert stream.push([last]) == character


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_cut_off_anywhere_ends_as_one_decode_ends_it(byte_level: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(byte_level)
    for end in range(len(text.encode()) + 1):
        token_ids = list(text.encode()[:end])
        joined = "".join(pieces_of(detokenizer, *([token_id] for token_id in token_ids)))
        assert joined == byte_level.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_ids_in_random_cuts_join_to_one_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    top = tokenizer.get_vocab_size()
    token_ids = data.draw(st.lists(st.integers(0, top - 1) | st.integers(top - 12, top - 1), max_size=60))
    cuts = data.draw(st.lists(st.integers(0, len(token_ids)), max_size=20).map(sorted))
    bounds = itertools.pairwise([0, *cuts, len(token_ids)])
    joined = "".join(pieces_of(Detokenizer(tokenizer), *(token_ids[start:end] for start, end in bounds)))
    assert joined == tokenizer.decode(token_ids, skip_special_tokens=True)


def test_what_was_shown_is_a_pure_function_of_the_tokens(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(1)
    token_ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(200)]
    token_by_token = detokenizer.stream()
    shown = ""
    for end, token_id in enumerate(token_ids, start=1):
        shown += token_by_token.push([token_id])
        resumed = detokenizer.stream()
        assert resumed.push(token_ids[:end]) == shown
    assert resumed.flush() == token_by_token.flush()


def test_dangling_bytes_come_once_at_the_end(byte_level: Tokenizer) -> None:
    stream = Detokenizer(byte_level).stream()
    assert stream.push("🙂".encode()[:3]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_and_odd_ids_have_no_text_and_never_raise(tokenizer: Tokenizer) -> None:
    stream = Detokenizer(tokenizer).stream()
    special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    assert stream.push([*special, -1, 10**6, 2**40]) == ""
    assert stream.flush() == ""


def test_special_tokens_do_not_cost_the_next_word_its_space(byte_fallback: Tokenizer) -> None:
    the, cat, bos = (id_of(byte_fallback, token) for token in ("▁the", "▁cat", "<s>"))
    stream = Detokenizer(byte_fallback).stream()
    assert [stream.push([token_id]) for token_id in (bos, the, bos, cat)] == ["", "the", "", " cat"]


def test_a_run_of_byte_tokens_is_shown_when_it_ends(byte_fallback: Tokenizer) -> None:
    cat = id_of(byte_fallback, "▁cat")
    smile = [id_of(byte_fallback, f"<0x{byte:02X}>") for byte in "🙂".encode()]
    stream = Detokenizer(byte_fallback).stream()
    assert [stream.push([token_id]) for token_id in [*smile, cat]] == ["", "", "", "", "🙂 cat"]


def test_old_tokens_are_let_go_of(byte_fallback: Tokenizer) -> None:
    stream = Detokenizer(byte_fallback).stream()
    assert isinstance(stream, _WindowStream)
    stream.push([id_of(byte_fallback, "▁the")] * 1000)
    assert len(stream._window) < 20


def test_added_tokens_that_are_not_special_are_text(byte_level: Tokenizer) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    tokenizer.add_tokens([AddedToken("<a tool>", special=False), AddedToken("<think>", special=False)])
    token_ids = [ord("x"), id_of(tokenizer, "<a tool>"), id_of(tokenizer, "<think>"), ord("y")]
    joined = "".join(pieces_of(Detokenizer(tokenizer), token_ids))
    assert joined == "x<a tool><think>y" == tokenizer.decode(token_ids, skip_special_tokens=True)


def test_an_unknown_kind_of_decoder_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="decoder WordPiece are not supported"):
        Detokenizer(tokenizer)


def test_a_model_directory_is_loaded(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert pieces_of(Detokenizer.load(tmp_path), list(b"hello")) == ["hello", ""]
