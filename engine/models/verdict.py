"""What the contract found out about a model, kept beside it so that a restart need not ask again.

The file holds for one configuration, one version of our code and one of the libraries: the first start with another
tests anew, which takes seconds, most of them to import transformers. No torch here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from engine.errors import ModelError
from engine.models.spec import ModelSpec

FILE = "everbatch.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a model is computed."""

    path: Literal["fused", "generic"]
    reason: str
    """Why: for the generic path, what the fused decoder lacks."""
    context_length: int
    """Positions of a sequence, prompt and output together."""
    eos_ids: frozenset[int]
    """End-of-sequence ids of the configuration; a generation_config.json has the later word."""
    spec: ModelSpec | None
    """What the fused decoder computes; None on the generic path."""


def recall(directory: Path) -> Verdict | None:
    """The verdict kept in `directory`; None if there is none that holds. Raises ModelError if it is a refusal."""
    try:
        kept = json.loads((directory / FILE).read_text(encoding="utf-8"))
        if kept["key"] != _key(directory):
            return None
        if "refusal" in kept:
            raise ModelError(f"{directory}: {kept['refusal']}")
        value = kept["verdict"]
        spec = None if value["spec"] is None else ModelSpec.from_json(value["spec"])
        return Verdict(**value | {"eos_ids": frozenset(value["eos_ids"]), "spec": spec})
    except (OSError, ValueError, KeyError, TypeError):  # not there, or somebody wrote into it: found out anew
        return None


def remember(directory: Path, verdict: Verdict | ModelError) -> None:
    """Keep it; where nothing can be written, the next start will test again."""
    kept: dict[str, object] = {"key": _key(directory)}
    if isinstance(verdict, Verdict):
        kept["verdict"] = dataclasses.asdict(verdict) | {"eos_ids": sorted(verdict.eos_ids)}
    else:
        kept["refusal"] = str(verdict)
    aside = directory / f".{FILE}.{os.getpid()}"
    try:
        # Renamed into place: workers that start together all write it.
        aside.write_text(json.dumps(kept), encoding="utf-8")
        aside.replace(directory / FILE)
    except OSError as error:
        _log.warning("%s cannot be written (%s): each start tests the model again", directory / FILE, error.strerror)


def _key(directory: Path) -> str:
    """Of all that a verdict depends on."""
    here, above = Path(__file__).parent, Path(__file__).parents[1]
    digest = hashlib.sha256(f"{_version('transformers')} {_version('torch')}".encode())
    ours = (*sorted(here.glob("*.py")), above / "attention.py", above / "shape.py")
    for path in (directory / "config.json", *ours):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
