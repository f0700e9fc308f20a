"""SmolLM2-135M-Instruct as a model directory, for the tests.

    python -m tests.smollm2

converts it once (20 s) and keeps it beside the installed packages; it is part of the set-up of `make test`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from engine.models import prepare
from engine.models.verdict import recall


def convert_once() -> Path:
    """The directory, by the converter that made it."""
    converter = Path(prepare.__file__).with_name("gguf.py").read_bytes()
    directory = Path(sys.prefix, "everbatch-models", f"smollm2-{hashlib.sha256(converter).hexdigest()[:12]}")
    # As the command, so that whatever the conversion imports and warns of stays in its own process.
    subprocess.run([sys.executable, "-m", prepare.__name__, "smollm2-135m-instruct", directory], check=True)
    if recall(directory) is None:  # the code has changed since
        find = (
            "import pathlib, sys; from engine.models.load import find_verdict; find_verdict(pathlib.Path(sys.argv[1]))"
        )
        subprocess.run([sys.executable, "-c", find, directory], check=True)
    return directory


if __name__ == "__main__":
    convert_once()
