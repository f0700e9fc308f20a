"""Grammars are tried beside the service: what they cost it is bounded, and a process that is gone is started again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece

from app.errors import Unavailable
from app.trials import Trials
from engine.echo import VOCAB_SIZE

GOOD = LLMatcher.grammar_from_regex("yes|no")
TOO_MUCH = "it takes more than 1 s or 512 MiB to compile"


def _schema(value: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(value))


BOMBS = {
    "a remainder for each state": _schema({"type": "integer", "multipleOf": 99_999_989}),
    "patterns all against all": _schema(
        {"type": "object", "patternProperties": {f"^a{{{n}}}b.*": {"type": "string"} for n in range(300)}}
    ),
    "an intersection of many": LLMatcher.grammar_from_lark(
        "start: T\nT: " + " & ".join(f"/.*[a-z]{{{n}}}.*/" for n in range(1, 25))
    ),
}
_FIRST, *_OTHERS = BOMBS


@pytest.fixture
def trials(echo_dir: Path) -> Iterator[Trials]:
    opened = Trials(echo_dir, VOCAB_SIZE)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", [_FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS)])
def test_a_bomb_is_refused_and_costs_this_process_next_to_nothing(name: str, trials: Trials) -> None:
    assert trials.problem_of(GOOD) is None
    began = time.process_time()
    assert trials.problem_of(BOMBS[name]) == TOO_MUCH
    assert time.process_time() - began < 0.2  # of the second that it got
    assert trials.problem_of(LLMatcher.grammar_from_regex("a+")) is None


def test_a_verdict_is_remembered(trials: Trials) -> None:
    bad = LLMatcher.grammar_from_regex("(")
    verdicts = [trials.problem_of(grammar) for grammar in (GOOD, bad)]
    trials.close()
    assert [trials.problem_of(grammar) for grammar in (GOOD, bad)] == verdicts
    assert trials._process is None


def test_a_process_that_was_killed_is_started_again(trials: Trials) -> None:
    assert trials.problem_of(GOOD) is None
    assert trials._process is not None
    process = psutil.Process(trials._process.pid)
    assert "EVERBATCH_DATABASE_URL" not in process.environ()
    process.kill()
    process.wait()
    assert trials.problem_of(LLMatcher.grammar_from_regex("a+")) is None


def test_a_process_that_does_not_start_is_no_verdict(tmp_path: Path) -> None:
    trials = Trials(tmp_path, 256)
    trials._command[-1] = "many"
    with pytest.raises(Unavailable):
        trials.problem_of(GOOD)
    trials.close()


def test_a_tokenizer_that_is_not_known_has_no_grammars(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    trials = Trials(tmp_path, 2)
    problem = trials.problem_of(GOOD)
    assert problem is not None and problem.startswith("the model's tokenizer cannot be used with grammars")
    trials.close()
