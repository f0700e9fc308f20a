"""The echo model: deterministic, resumable, and a model directory like any other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer

from engine.echo import EchoRunner, echo_token, write_model
from engine.request import Sampling, TokenLogprob
from engine.step import Chunk, pack


def test_a_token_depends_on_seed_and_position_alone() -> None:
    runner = EchoRunner()
    sampling = Sampling(max_tokens=9, seed=5)
    prefill = Chunk("a", (1, 2, 3), 4, (0,), sampling)
    piece = Chunk("b", (9, 9), 0, (1,), None)
    decode = Chunk("c", (200,), 6, (2, 3), sampling)
    sampled = runner.execute(pack(1, (decode, prefill, piece), block_size=16))
    assert sampled.token_ids == [echo_token(5, 7), echo_token(5, 7)]


def test_streams_of_different_seeds_differ() -> None:
    streams = {tuple(echo_token(seed, position) for position in range(32)) for seed in (0, 1, 2, 2**63 - 1)}
    assert len(streams) == 4


def test_choices_have_streams_of_their_own_and_the_first_is_the_seeds() -> None:
    streams = {tuple(echo_token(5, position, choice=choice) for position in range(32)) for choice in range(4)}
    assert len(streams) == 4
    assert tuple(echo_token(5, position) for position in range(32)) in streams


def test_the_token_is_certain_and_no_other_is_likely() -> None:
    samplings = [Sampling(9, seed=row, top_logprobs=asked) for row, asked in enumerate((None, 0, 5))]
    chunks = [Chunk(str(row), (1,), 3, (0,), sampling) for row, sampling in enumerate(samplings)]
    sampled = EchoRunner().execute(pack(1, chunks, block_size=16))
    _, second, third = sampled.token_ids
    assert sampled.logprobs == {1: TokenLogprob(second, 0.0), 2: TokenLogprob(third, 0.0, ((third, 0.0),))}


def test_the_text_is_words_of_letters_and_never_ends_itself() -> None:
    tokens = [echo_token(3, position) for position in range(8192)]
    text = bytes(tokens).decode("ascii")
    assert set(text) == set("abcdefghijklmnopqrstuvwxyz ")
    assert 0.1 < text.count(" ") / len(text) < 0.3
    assert not EchoRunner().eos_ids & set(tokens)


def test_the_model_directory_names_its_limits_and_its_end_token(tmp_path: Path) -> None:
    write_model(tmp_path / "echo")
    write_model(tmp_path / "echo")  # again, over itself
    config = json.loads((tmp_path / "echo/config.json").read_text())
    tokenizer = Tokenizer.from_file(str(tmp_path / "echo/tokenizer.json"))
    runner = EchoRunner()
    assert config["model_type"] == "echo"
    assert config["max_position_embeddings"] == runner.context_length == 8192
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert {config["eos_token_id"]} == runner.eos_ids == {tokenizer.token_to_id("<|im_end|>")}


def test_a_token_is_a_byte_and_control_tokens_are_single(tmp_path: Path) -> None:
    write_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Grüße, 世界 👋\n\x00"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n").ids == [257, *b"user\nhi", 258, *b"\n"]


def test_the_engine_runs_without_torch() -> None:
    modules = "engine.echo, engine.loop, engine.scheduler"
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
