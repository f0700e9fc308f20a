"""The models of the engine's tests: a tiny random one, and the real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.models.load import find_verdict
from tests.smollm2 import convert_once


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    return convert_once()


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
    find_verdict(directory)  # here, where transformers is imported, so that no process of lanes need import it
    return directory
