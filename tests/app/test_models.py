from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app import models
from app.errors import SetupError
from app.settings import Settings


def describe(directory: Path, config: dict[str, Any]) -> models.Model:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return models.describe(Settings(model=str(directory)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 96}, 96),
        ({"n_positions": 80}, 80),  # GPT-2
        ({"max_position_embeddings": 96, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 96),
        (  # the frequencies of longer sequences are others
            {
                "max_position_embeddings": 96,
                "original_max_position_embeddings": 48,
                "rope_scaling": {"type": "longrope"},
            },
            48,
        ),
    ],
)
def test_the_context_is_as_long_as_the_engine_has_it(config: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert describe(tmp_path, config | {"model_type": "llama", "vocab_size": 8}).context_length == expected


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"vocab_size": 8}, "lacks max_position_embeddings"),
        ({"n_positions": 80}, "lacks vocab_size"),
        ({"n_positions": 80, "vocab_size": 8, "auto_map": {}}, "code of its own"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(
    config: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(SetupError, match=complaint):
        describe(tmp_path, config)
