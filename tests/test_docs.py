"""What the documents say is true of the code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from app.settings import Settings
from app.tiers import Tier, TierSettings, TierTable

PROJECT = Path(__file__).parent.parent
OPERATIONS = (PROJECT / "docs" / "operations.md").read_text()
README = (PROJECT / "README.md").read_text()


def test_operations_name_every_setting_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `EVERBATCH_(\w+)` \| (.*?) \|", OPERATIONS, re.MULTILINE))
    assert sorted(rows) == sorted(name.upper() for name in Settings.model_fields)
    for name, field in Settings.model_fields.items():
        match field.default:
            case None:
                assert rows[name.upper()] == "—", name
            case bool() | int() | float():
                assert float(rows[name.upper()]) == field.default, name
            case str():
                assert rows[name.upper()] == field.default, name


def test_operations_name_what_each_tier_gets() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| (\S+) \| (\S+) \| (\S+) \|", OPERATIONS, re.MULTILINE)
    assert [name.lower() for name, *_ in rows] == list(TierSettings.model_fields)
    for name, *values in rows:
        usual = [getattr(TierTable()[tier], name.lower()) for tier in Tier]
        assert [None if value == "—" else float(value) for value in values] == usual, name


def test_the_readme_names_every_file_of_the_code_and_no_other() -> None:
    tree = README.split("## The house")[1].split("```")[1]
    tracked = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    code = {
        path
        for path in tracked.splitlines()
        if path.endswith(".py")
        and path.split("/")[0] in {"app", "worker", "engine", "kernels", "benchmarks", "deploy"}
        and not (path.endswith("__init__.py") and not (PROJECT / path).read_text())
    }
    assert {path for path in _full_paths(tree) if path.endswith(".py")} == code


def _full_paths(tree: str) -> list[str]:
    """The tree's lines with their folders before them: indentation by two, a folder ends in a slash."""
    folders: list[str] = []
    paths = []
    for line in tree.strip("\n").splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        paths.append("".join(folders) + name)
        if name.endswith("/"):
            folders.append(name)
    return paths
