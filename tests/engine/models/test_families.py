"""Tiny random models of each family against transformers' eager attention, or refused with the layer named."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import ModelError
from engine.models.describe import FAMILIES
from engine.models.load import find_verdict, load_model
from engine.models.twin import randomize
from tests.engine.models.families import FUSED, GENERIC, REFUSED, TINY, Case
from tests.engine.packed import CPU, Sequences

TABLES = {
    "neighbouring blocks": [tuple(range(0, 6)), tuple(range(6, 12)), tuple(range(12, 18))],
    "scattered blocks": [(11, 2, 17, 5, 8, 14), (0, 16, 3, 9, 6, 12), (1, 15, 10, 4, 13, 7)],
}
DOCS = Path(__file__).parents[3] / "docs/models.md"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost such small models more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cases(table: Mapping[str, Case]) -> list[Any]:
    return [pytest.param(case, id=name, marks=() if case.is_fast else pytest.mark.slow) for name, case in table.items()]


def save(case: Case, directory: Path) -> Any:
    """Write a random model of the case in fp32, and return it with eager attention."""
    config = AutoConfig.for_model(case.model_type, **case.config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(directory)
    return model


def expect_same(model: Any, directory: Path, tables: list[tuple[int, ...]]) -> None:
    """The logits of sequences in a batch are those of transformers for each alone."""
    tokens = torch.randint(3, TINY["vocab_size"], (3, 22), generator=torch.Generator().manual_seed(1)).tolist()
    sequences = Sequences(load_model(directory, dtype=torch.float32, device=CPU).decoder, tables)
    sequences.run(tokens)
    for index, logits in enumerate(sequences.logits):
        with torch.inference_mode():
            truth = model(torch.tensor([tokens[index][: len(logits)]]), use_cache=False).logits[0]
        error = (torch.stack(logits) - truth).abs().max() / truth.abs().max()
        assert error <= 1e-5, f"sequence {index}: relative error {error:.1e}"


@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("case", cases(FUSED))
def test_the_fused_decoder_computes_what_transformers_does(
    case: Case, tables: list[tuple[int, ...]], tmp_path: Path
) -> None:
    model = save(case, tmp_path)
    verdict = find_verdict(tmp_path)
    assert verdict.path == "fused", verdict.reason
    expect_same(model, tmp_path, tables)


@pytest.mark.parametrize("case", cases(GENERIC))
def test_the_general_path_computes_what_transformers_does(case: Case, tmp_path: Path) -> None:
    model = save(case, tmp_path)
    assert find_verdict(tmp_path).path == "generic"
    expect_same(model, tmp_path, TABLES["scattered blocks"])


@pytest.mark.parametrize("case", cases(REFUSED))
def test_a_model_that_would_be_silently_wrong_is_refused_with_its_layer(case: Case, tmp_path: Path) -> None:
    AutoConfig.for_model(case.model_type, **case.config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{case.model_type} is refused: {case.fault}"):
        find_verdict(tmp_path)


def test_the_documentation_has_a_row_for_each_family() -> None:
    row = re.compile(r"^\| `(\w+)` \| (fused|generic|refused) \| (.+) \|$", re.MULTILINE)
    rows = row.findall(DOCS.read_text(encoding="utf-8"))
    tables = {"fused": FUSED, "generic": GENERIC, "refused": REFUSED}
    # A family is listed as what its configuration without a qualification is.
    expected = {
        (name, path) for path, table in tables.items() for name, case in table.items() if name == case.model_type
    }
    assert {(family, path) for family, path, _ in rows} == expected
    assert len(rows) == len(expected) >= 40
    for family, path, remark in rows:
        if path == "refused":
            assert REFUSED[family].fault in remark
    assert {case.model_type for case in FUSED.values()} == set(FAMILIES)
