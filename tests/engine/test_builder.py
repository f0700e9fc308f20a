from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.builder import build
from engine.config import EngineConfig
from engine.echo import write_model
from engine.errors import ModelError


def test_no_engine_needs_torch_in_the_process_that_serves_jobs(tmp_path: Path, llama_dir: Path) -> None:
    write_model(tmp_path)
    shutil.copy(tmp_path / "tokenizer.json", llama_dir)
    program = (
        "import pathlib, sys\n"
        "from engine.builder import build\n"
        "from engine.config import EngineConfig\n"
        f"for directory in {str(tmp_path)!r}, {str(llama_dir)!r}:\n"
        "    engine = build(EngineConfig(pathlib.Path(directory), max_num_seqs=3))\n"
        "    assert engine.stats().slots == 3\n"
        "    engine.close()\n"
        "assert not {'torch', 'transformers', 'triton'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config.json cannot be read"),
        ('{"model_type": "llama", "auto_map": {}}', "remote code is never run"),
        ('{"model_type": "echo"}', "tokenizer.json cannot be used"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_in_one_sentence(
    config: str | None, message: str, tmp_path: Path
) -> None:
    if config:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=message) as refusal:
        build(EngineConfig(tmp_path))
    assert "\n" not in str(refusal.value)
