"""Grammars say which tokens may come: those that go on within them, the end where it may be, never a control token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from tokenizers.models import Model, Unigram, WordPiece

from engine import grammars as module
from engine.echo import VOCAB_SIZE, EchoRunner, write_model
from engine.grammars import GrammarError, Grammars, Guide
from tests.guiding import regex, schema

EOS = next(iter(EchoRunner().eos_ids))
CONTROL = [token_id for token_id in range(256, VOCAB_SIZE) if token_id != EOS]


@pytest.fixture(scope="module")
def echo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("echo")
    write_model(directory)
    return directory


@pytest.fixture
def grammars(echo_dir: Path) -> Iterator[Grammars]:
    yield Grammars.load(echo_dir, vocab_size=VOCAB_SIZE, eos_ids={EOS})


def may_come(guide: Guide) -> set[int]:
    assert guide.mask is not None
    assert guide.mask.dtype == np.int32
    assert guide.mask.shape == (-(-VOCAB_SIZE // 32),)
    return set(np.flatnonzero(np.unpackbits(guide.mask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    ("grammar", "text", "follows", "may_end"),
    [
        (regex("ab|ac|a"), "", "a", False),
        (regex("ab|ac|a"), "a", "bc", True),
        (regex("[0-9]{2,3}x?"), "1", "0123456789", False),
        (regex("[0-9]{2,3}x?"), "12", "0123456789x", True),
        (regex("[0-9]{2,3}x?"), "123", "x", True),
        (schema({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}), '{"a":', "tf", False),
        (schema({"enum": ["one", "two", 3]}), "", '"3', False),
        (schema({"enum": ["one", "two", 3]}), '"', "ot", False),
        (LLMatcher.grammar_from_lark('start: "a" start "b" | ""'), "aa", "ab", False),
        (LLMatcher.grammar_from_lark('start: "(" start ")" start | ""'), "(())", "(", True),
    ],
)
def test_what_goes_on_within_the_grammar_may_come(
    grammar: str, text: str, follows: str, may_end: bool, grammars: Grammars
) -> None:
    expected = set(follows.encode()) | ({EOS} if may_end else set())
    assert may_come(grammars.compile(grammar, list(text.encode()))) == expected
    guide = grammars.compile(grammar, [])
    for byte in text.encode():
        assert byte in may_come(guide)
        grammars.advance([(guide, byte)])
    assert may_come(guide) == expected


def test_a_whole_text_that_nothing_may_follow_is_complete(grammars: Grammars) -> None:
    guide = grammars.compile(regex("ab?"), [])
    assert not guide.is_complete
    grammars.advance([(guide, ord("a"))])
    assert not guide.is_complete  # it may end, and it may go on
    grammars.advance([(guide, ord("b"))])
    assert guide.is_complete
    assert grammars.compile(regex("ab?"), list(b"ab")).is_complete


def test_one_call_advances_lines_of_different_grammars(grammars: Grammars) -> None:
    patterns = ["a[b-d]", "a[x-z]?", "[^b]+", "a"]
    guides = [grammars.compile(regex(pattern), []) for pattern in patterns]
    grammars.advance([(guide, ord("a")) for guide in guides])
    assert may_come(guides[0]) == set(b"bcd")
    assert may_come(guides[1]) == {*b"xyz", EOS}
    assert may_come(guides[2]) == {*range(1, 0xF5), 0, EOS} - {ord("b"), *range(0x80, 0xC2)}  # first bytes of UTF-8
    assert guides[3].is_complete


@pytest.mark.parametrize(
    ("lark", "text", "message"),
    [
        ('start: "a" <|im_start|> "b"', "a", "cannot be compiled"),
        ("start: <|endoftext|>", "", "cannot be compiled"),
        (f'start: "ab" <[{CONTROL[0]}]>', "ab", "No token may follow"),
        (f'start: "a" <[{EOS}]> "b"', "a", "No token may follow"),  # the text must not end there
    ],
)
def test_a_control_token_that_a_grammar_names_never_comes(
    lark: str, text: str, message: str, grammars: Grammars
) -> None:
    grammar = LLMatcher.grammar_from_lark(lark)
    with pytest.raises(GrammarError, match=message):
        grammars.compile(grammar, list(text.encode()))


def test_the_text_of_a_control_token_is_text(grammars: Grammars) -> None:
    guide = grammars.compile(regex("(a)<\\|im_end\\|>!"), [])
    for byte in b"a<|im_end|>!":
        assert may_come(guide) == {byte}
        grammars.advance([(guide, byte)])
    assert guide.is_complete


@pytest.mark.parametrize("grammar", [regex(".{1,9}"), schema({}), regex("<\\|im_start\\|>"), regex("[^a]*")])
def test_no_control_token_comes_at_any_place(grammar: str, grammars: Grammars) -> None:
    guide, dice = grammars.compile(grammar, []), np.random.default_rng(0)
    for _ in range(60):
        if guide.is_complete:
            break
        ids = may_come(guide)
        assert not ids & set(CONTROL)
        token_id = int(dice.choice(sorted(ids - {EOS} or {EOS})))
        if token_id == EOS:
            break
        grammars.advance([(guide, token_id)])
        assert guide.problem is None


@pytest.mark.parametrize(
    ("grammar", "text", "message"),
    [
        ("", "", "cannot be compiled"),
        ("{", "", "cannot be compiled"),
        ("start: word", "", "unknown name"),
        (regex("("), "", "invalid regex"),
        (schema({"not": {}}), "", "not"),
        (regex("ab"), "ax", "tokens so far do not fit"),
    ],
)
def test_a_grammar_that_is_none_is_told(grammar: str, text: str, message: str, grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match=message) as told:
        grammars.compile(grammar, list(text.encode()))
    assert "\n" not in str(told.value)


def test_a_token_outside_the_grammar_is_its_lines_problem_alone(grammars: Grammars) -> None:
    wrong, right = (grammars.compile(regex("ab+"), []) for _ in range(2))
    grammars.advance([(wrong, ord("x")), (right, ord("a"))])
    assert wrong.problem is not None and "does not fit" in wrong.problem
    assert not wrong.is_complete
    assert right.problem is None
    assert may_come(right) == {ord("b")}


def test_a_compiled_grammar_is_used_again_but_not_for_ever(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[str]()

    def compile(tokenizer: LLTokenizer, grammar: str, **options: Any) -> LLMatcher:
        compiled.append(grammar)
        return LLMatcher(tokenizer, grammar, **options)

    monkeypatch.setattr(module, "LLMatcher", compile)
    monkeypatch.setattr(module, "_MAX_COPIES", 3)
    monkeypatch.setattr(module, "_MAX_KEPT", 2)
    for _ in range(4):
        assert may_come(grammars.compile(regex("a"), [])) == {ord("a")}
    assert len(compiled) == 1
    grammars.compile(regex("a"), [])
    assert len(compiled) == 2
    for pattern in "bca":
        assert may_come(grammars.compile(regex(pattern), [])) == {ord(pattern)}
    assert len(compiled) == 5


@pytest.mark.parametrize("model", [None, Unigram([("a", 0.0)], 0), WordPiece({"[UNK]": 0}, unk_token="[UNK]")])
def test_an_unknown_tokenizer_is_told(model: Model | None, tmp_path: Path) -> None:
    if model is not None:
        Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(GrammarError, match="tokenizer cannot be used"):
        Grammars.load(tmp_path, vocab_size=4, eos_ids={1})
