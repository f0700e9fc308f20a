from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from app.cli import main


def test_a_file_that_is_no_gguf_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    done = CliRunner().invoke(main, ["convert", str(file), str(tmp_path / "model")])
    assert done.exit_code == 2
    assert "model.bin is no *.gguf" in done.output


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    file, directory = tmp_path / "model.gguf", tmp_path / "diary"
    file.touch()
    directory.mkdir()
    (directory / "page").touch()
    command = [sys.executable, "-m", "app.cli", "convert", str(file), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"{directory} exists and is not a model: name an empty or new directory\n"
