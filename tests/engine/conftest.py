"""The models of the engine's tests: a tiny random one, and the real one."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.models import prepare


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a model directory: converted once (20 s), then kept beside the installed packages."""
    converter = Path(prepare.__file__).with_name("gguf.py").read_bytes()
    directory = Path(sys.prefix, "everbatch-models", f"smollm2-{hashlib.sha256(converter).hexdigest()[:12]}")
    # As the command, so that whatever the conversion imports and warns of stays in its own process.
    subprocess.run([sys.executable, "-m", prepare.__name__, "smollm2-135m-instruct", directory], check=True)
    return directory


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Llama whose logits are far apart."""
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=[2, 5],
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
