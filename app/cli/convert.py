"""everbatch convert: a GGUF file becomes a model directory, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click


@click.command()
@click.argument("gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
def convert(gguf: Path, directory: Path) -> None:
    """Make of a GGUF file the model directory that EVERBATCH_MODEL may name.

    Takes seconds to minutes and the memory of the whole model; workers load only what it writes.
    """
    if gguf.suffix != ".gguf":
        raise click.BadParameter(f"{gguf.name} is no *.gguf", param_hint="GGUF")
    # In a process of its own: it takes torch, which we never import.
    done = subprocess.run([sys.executable, "-m", "engine.models.prepare", str(gguf), str(directory)])
    sys.exit(done.returncode)
