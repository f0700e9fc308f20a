"""The engine's logprobs, spelled: tokens of both kinds of tokenizer by their bytes."""

from __future__ import annotations

import math
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from app import logprobs
from engine.echo import write_model
from engine.request import TokenLogprob
from worker.logprobs import LEAST, Speller


def test_a_byte_level_token_is_its_bytes_and_a_special_one_its_name(tmp_path: Path) -> None:
    write_model(tmp_path)
    speller = Speller(tmp_path)
    assert b"".join(map(speller.bytes_of, range(256))) == bytes(range(256))
    assert [speller.bytes_of(token_id) for token_id in (256, 258, 259, 10**6)] == [
        b"<|endoftext|>",
        b"<|im_end|>",
        b"",
        b"",
    ]


def test_a_sentencepiece_token_is_its_text_with_spaces_or_its_byte(tmp_path: Path) -> None:
    pieces = ["<unk>", "<0xE2>", "▁the", "é", "▁▁"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    spelled = [Speller(tmp_path).bytes_of(token_id) for token_id in range(len(pieces))]
    assert spelled == [b"<unk>", b"\xe2", b" the", "é".encode(), b"  "]


def test_numbers_are_such_as_json_has_and_no_longer_than_they_are_good_for(tmp_path: Path) -> None:
    write_model(tmp_path)
    spelled = Speller(tmp_path).spelled(TokenLogprob(97, -0.123456789, ((98, 0.0), (99, -math.inf))))
    assert spelled == logprobs.TokenLogprob(b"a", -0.123457, ((b"b", 0.0), (b"c", LEAST)))
