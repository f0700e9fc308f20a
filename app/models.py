"""The served model, as its directory describes it: name, revision, limits. No weights are read here.

A directory is a local Hugging Face one: config.json, tokenizer.json, *.safetensors. Never remote code.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import SetupError
from app.settings import Settings

BUILT_IN = ("smollm2-135m-instruct", "echo")
"""Models that `python -m engine.models.prepare` makes; they lie in the home."""

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions")
"""What config.json calls the number of positions."""


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    """What clients call it."""
    revision: str
    """12 hexadecimal digits over its configuration, tokenizer and the headers of its weights."""
    directory: Path
    context_length: int
    """Positions of a sequence, prompt and output together."""
    vocab_size: int


def directory_of(settings: Settings) -> Path:
    """Where the model of the settings lies, or will lie once it is prepared."""
    if settings.model in BUILT_IN:
        return settings.home / "models" / settings.model
    return Path(settings.model).expanduser().resolve()


def describe(settings: Settings) -> Model:
    """The model of the settings. Raises SetupError, with the model's name, when it cannot be served."""
    directory = directory_of(settings)
    config = _config(settings.model, directory)
    if "auto_map" in config:
        raise SetupError(f"EVERBATCH_MODEL: '{settings.model}' asks for code of its own (auto_map), which is never run")
    if config.get("model_type") != "echo" and not list(directory.glob("*.safetensors")):
        raise SetupError(f"EVERBATCH_MODEL: '{settings.model}' has no *.safetensors; other formats are not read")
    if not (directory / "tokenizer.json").is_file():
        raise SetupError(f"EVERBATCH_MODEL: '{settings.model}' has no tokenizer.json")
    return Model(
        name=_name(directory),
        revision=_revision(directory),
        directory=directory,
        context_length=_context_length(config),
        vocab_size=int(config["vocab_size"]),
    )


def _config(model: str, directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text())
    except OSError as error:
        raise SetupError(f"EVERBATCH_MODEL: '{model}' has no readable config.json in {directory}") from error
    except ValueError as error:
        raise SetupError(f"EVERBATCH_MODEL: the config.json of '{model}' is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SetupError(f"EVERBATCH_MODEL: the config.json of '{model}' is not a JSON object")
    has_context = any(isinstance(config.get(key), int) for key in _CONTEXT_KEYS)
    missing = [] if has_context else [_CONTEXT_KEYS[0]]
    missing += [] if isinstance(config.get("vocab_size"), int) else ["vocab_size"]
    if missing:
        raise SetupError(f"EVERBATCH_MODEL: the config.json of '{model}' lacks {', '.join(missing)}")
    return config


def _context_length(config: dict[str, Any]) -> int:
    """As the engine has it: frequencies of kind "longrope" are those of the original context only."""
    length = next(int(config[key]) for key in _CONTEXT_KEYS if isinstance(config.get(key), int))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return length
    return min(
        length, rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or length
    )


def _name(directory: Path) -> str:
    """The directory's name in lower case, with what a queue's name could not carry replaced."""
    return re.sub(r"[^a-z0-9._-]+", "-", directory.name.lower()).strip("-.") or "model"


def _revision(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        digest.update((directory / name).read_bytes())
    for weights in sorted(directory.glob("*.safetensors")):
        digest.update(f"{weights.name} {weights.stat().st_size}".encode())
        with weights.open("rb") as file:
            digest.update(file.read(1 << 20))
    return digest.hexdigest()[:12]
