"""A GGUF file becomes a Hugging Face directory in bf16 safetensors, once.

Straight from GGUF, a model of 135 M parameters takes 20 s and 1.2 GB to load; from the directory 1 s and 0.5 GB.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

# Before transformers is imported: nothing here may look for a network.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from engine.errors import ModelError


def convert(gguf: Path, directory: Path) -> None:
    """Write config.json, model.safetensors (bf16) and the tokenizer's files into `directory`.

    Raises ModelError if transformers cannot read the file.
    """
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
        model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.bfloat16, **source)
    except Exception as error:  # whatever a broken file makes of it
        raise ModelError(f"{gguf} cannot be read: {_first_line(error)}") from error
    # transformers calls a model from GGUF quantized and refuses to save it, though its weights are plain tensors.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # safetensors writes 0600; the file is no secret


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
