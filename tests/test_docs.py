"""What the documents say is true of the code."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from app.api.metrics import Metrics
from app.db import Database
from app.settings import Settings
from app.tiers import Tier, TierSettings, TierTable
from engine.builder import build
from engine.config import EngineConfig
from engine.echo import write_model
from worker.metrics import IoMetrics, WorkerMetrics

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


def test_operations_name_every_metric_with_its_meaning_and_no_other(database: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    engine, counted = build(EngineConfig(tmp_path)), Database(database)
    try:
        registries = (
            WorkerMetrics(engine, lambda: True).registry,
            IoMetrics(lambda: True).registry,
            Metrics(counted, "echo", lambda: 0).registry,
        )
        meanings = {name: text for registry in registries for name, text in _metrics(registry)}
    finally:
        engine.close()
        counted.close()
    rows = dict(re.findall(r"^\| `(everbatch_\w+)` \| (.*?) \|$", OPERATIONS, re.MULTILINE))
    assert rows == meanings
    assert set(re.findall(r"`(everbatch_\w+)", OPERATIONS)) == meanings.keys()


def _metrics(registry: CollectorRegistry) -> Iterator[tuple[str, str]]:
    """Names as they are scraped, and what each says of itself."""
    for family in registry.collect():
        yield family.name + ("_total" if family.type == "counter" else ""), family.documentation


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
