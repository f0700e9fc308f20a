"""The real model, for all tests of the engine that need it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from engine.models import prepare


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a model directory: converted once (20 s), then kept beside the installed packages."""
    converter = Path(prepare.__file__).with_name("gguf.py").read_bytes()
    directory = Path(sys.prefix, "everbatch-models", f"smollm2-{hashlib.sha256(converter).hexdigest()[:12]}")
    # As the command, so that whatever the conversion imports and warns of stays in its own process.
    subprocess.run([sys.executable, "-m", prepare.__name__, "smollm2-135m-instruct", directory], check=True)
    return directory
