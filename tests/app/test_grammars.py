"""The form that a text must have: what is taken and what of it allows which texts, and how wrong ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from app import submissions
from app.errors import InvalidRequest
from app.grammars import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_PATTERN_LENGTH, MAX_SCHEMA_NODES, Grammars
from app.models import Model
from app.prompts import Prompts
from app.rows import Desk, Line, encoded, row_of
from app.settings import Settings

CHAT = "/v1/chat/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}


@pytest.fixture(scope="module")
def settings(echo_dir: Path) -> Settings:
    return Settings(model=str(echo_dir))


@pytest.fixture(scope="module")
def grammars(model: Model) -> Iterator[Grammars]:
    opened = Grammars(model)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def written(grammars: Grammars) -> Callable[..., str | None]:
    """The grammar of a job's body."""
    return lambda **fields: grammars.of(submissions.parse({"prompt": "hello", **fields}))


@pytest.fixture(scope="module")
def allows(model: Model) -> Callable[[str, str], bool]:
    """Whether a grammar allows this whole text."""
    tokenizer = LLTokenizer(str(model.directory / "tokenizer.json"))

    def allows(grammar: str, text: str) -> bool:
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = list(text.encode())
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    return allows


def named(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"response_format": named(PERSON, strict=True, description="A person")},
            ['{"name":"Ann","age":7}', '{"name":"","age":99}', '{"name":"😀\\n","age":0}'],
            [
                '{"name": "Ann","age":7}',
                '{"age":7,"name":"Ann"}',
                '{"name":"Ann","age":100}',
                '{"name":"Ann"}',
                "{}",
                "",
            ],
        ),
        (
            {"response_format": {"type": "json_object"}},
            ["{}", '{"a":[1,{"b":null}]}'],
            ["[]", '"a"', "{} ", '{"a": 1}'],
        ),
        ({"structured": {"json_schema": {"type": ["integer", "null"]}}}, ["-5", "null"], ["1.5", "nil"]),
        ({"structured": {"json_schema": TREE}}, ["{}", '{"next":{"next":{}}}'], ['{"next":1}', '{"last":{}}']),
        ({"structured": {"regex": "[a-c]{2,3}/\\d"}}, ["ab/1", "abc/0"], ["a/1", "ab/1x", "abcd/1", "ab/"]),
        ({"structured": {"regex": "^(?i:yes|no)$"}}, ["yes", "NO"], ["^yes$", "maybe"]),
        ({"structured": {"regex": "é\n.+"}}, ["é\n👩‍👩‍👧"], ["é\n", "é x"]),
        (
            {"structured": {"choice": ["yes", "no way", "a.b|c", '"\\/', "\x7f\u2028\t", "👩‍👩‍👧", "yes"]}},
            ["yes", "no way", "a.b|c", '"\\/', "\x7f\u2028\t", "👩‍👩‍👧"],
            ["ye", "yesno way", "aXb|c", "a.b", "c", "no"],
        ),
        (
            {"structured": {"grammar": 'start: "<" word "|>" ("," word)*\nword: /[a-z]+/  // <|im_end|>\n'}},
            ["<a|>", "<ab|>,cd"],
            ["<|im_end|>", "a", "<a|>,"],
        ),
    ],
)
def test_a_form_allows_its_texts_and_no_others(
    fields: dict[str, Any], good: list[str], bad: list[str], written: Any, allows: Any
) -> None:
    grammar = written(**fields)
    assert [text for text in good if not allows(grammar, text)] == []
    assert [text for text in bad if allows(grammar, text)] == []


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_a_text_of_any_form_has_no_grammar(fields: dict[str, Any], written: Any) -> None:
    assert written(**fields) is None


SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": "json"}, "response_format", "object"),
        ({"response_format": {}}, "response_format", "type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x", "no field"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA, "missing"),
        ({"response_format": named({}, name="a b")}, "response_format.json_schema.name", "match"),
        ({"response_format": named([])}, SCHEMA, "dictionary"),
        ({"response_format": named({"type": "strin"})}, SCHEMA, "Invalid type: strin"),
        ({"response_format": named({"type": "array", "uniqueItems": True})}, SCHEMA, "uniqueItems"),
        ({"response_format": named({"not": {}})}, SCHEMA, "not"),
        ({"response_format": named({"$ref": "http://127.0.0.1:1/x.json"})}, SCHEMA, "does not fetch"),
        ({"response_format": named({"$ref": "file:///etc/passwd"})}, SCHEMA, "does not fetch"),
        ({"response_format": named({"$ref": "#"})}, SCHEMA, "no text fits it"),
        ({"response_format": named({"$ref": "#/$defs/none"})}, SCHEMA, "none"),
        ({"response_format": named({"type": "string", "pattern": "("})}, SCHEMA, ""),
        ({"response_format": named({"x-guidance": {"lenient": True}})}, SCHEMA, "x-guidance"),
        ({"response_format": named({"const": "a" * MAX_GRAMMAR_BYTES})}, SCHEMA, "larger than"),
        ({"response_format": named({"enum": [1] * MAX_SCHEMA_NODES})}, SCHEMA, "nodes"),
        ({"response_format": named({"pattern": "a" * (MAX_PATTERN_LENGTH + 1)})}, SCHEMA, "pattern"),
        ({"response_format": named({"patternProperties": {"a" * (MAX_PATTERN_LENGTH + 1): {}}})}, SCHEMA, "pattern"),
        ({"structured": {}}, "structured", "exactly one"),
        ({"structured": {"regex": "a", "choice": ["a"]}}, "structured", "exactly one"),
        ({"structured": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured", "either"),
        ({"structured": {"schema": {}}}, "structured.schema", "no field"),
        ({"structured": {"json_schema": {"type": 5}}}, "structured.json_schema", ""),
        ({"structured": {"json_schema": "{}"}}, "structured.json_schema", "dictionary"),
        ({"structured": {"regex": ""}}, "structured.regex", "at least 1"),
        ({"structured": {"regex": "a" * (MAX_PATTERN_LENGTH + 1)}}, "structured.regex", "at most"),
        ({"structured": {"regex": "(("}}, "structured.regex", "unclosed group"),
        ({"structured": {"regex": "a\\"}}, "structured.regex", "backslash"),
        ({"structured": {"regex": "a(?=b)"}}, "structured.regex", "look-around"),
        ({"structured": {"regex": r"(a)\1"}}, "structured.regex", "backreferences"),
        ({"structured": {"choice": []}}, "structured.choice", "at least 1"),
        ({"structured": {"choice": [""]}}, "structured.choice[0]", "at least 1"),
        ({"structured": {"choice": ["a", 5]}}, "structured.choice[1]", "string"),
        ({"structured": {"choice": ["a"] * (MAX_CHOICES + 1)}}, "structured.choice", "at most"),
        ({"structured": {"choice": ["a" * (MAX_GRAMMAR_BYTES + 1)]}}, "structured.choice", "larger than"),
        ({"structured": {"grammar": "start: word"}}, "structured.grammar", "word"),
        ({"structured": {"grammar": 'begin: "a"'}}, "structured.grammar", "start"),
        ({"structured": {"grammar": 'start: start "a"'}}, "structured.grammar", "no text fits it"),
        ({"structured": {"grammar": 'start: "a" <|im_start|>'}}, "structured.grammar", "single tokens"),
        ({"structured": {"grammar": 'start: "//" <[5]> "//"'}}, "structured.grammar", "single tokens"),
        ({"structured": {"grammar": '{"grammars": [{"regex": "a"}]}'}}, "structured.grammar", ""),
        ({"structured": {"grammar": "start: " + "(" * 5000}}, "structured.grammar", ""),
        ({"structured": {"grammar": 'start: "' + "a" * MAX_GRAMMAR_BYTES + '"'}}, "structured.grammar", "larger than"),
        ({"structured": {"grammar": '%import ../../etc.passwd\nstart: "a"'}}, "structured.grammar", ""),
    ],
)
def test_a_wrong_form_is_refused_by_its_name(fields: dict[str, Any], param: str, message: str, written: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        written(**fields)
    assert refused.value.param == param
    assert message in refused.value.message
    assert len(refused.value.message) < 500


def test_a_batch_row_has_a_form_too(settings: Settings, model: Model, grammars: Grammars) -> None:
    desk = Desk(settings, model, Prompts(model), grammars)

    def submission_of(**fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "hello"}], **fields}
        line = encoded({"custom_id": "a", "method": "POST", "url": CHAT, "body": body})
        row = row_of(Line(1, len(line), line, is_blank=False), endpoint=CHAT, max_bytes=10**6)
        return desk.submission_of(row, CHAT)

    asked = submission_of(response_format=named(PERSON))
    assert json.loads(asked.sampling["grammar"])["grammars"][0]["json_schema"]["properties"] == PERSON["properties"]
    with pytest.raises(InvalidRequest) as refused:
        submission_of(response_format=named({"type": "strin"}))
    assert refused.value.param == f"body.{SCHEMA}"
    assert refused.value.message.startswith(f"body.{SCHEMA}: ")


# ---- whatever comes

KEYWORDS = st.sampled_from(
    ["type", "properties", "items", "enum", "const", "anyOf", "allOf", "oneOf", "not", "$ref", "$defs", "required",
     "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "multipleOf", "pattern", "format",
     "patternProperties", "additionalProperties", "prefixItems", "if", "then", "$id", "default", "a"]
)  # fmt: skip
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(["object", "array", "string", "integer", "number", "date-time", "uuid", "#", "#/$defs/a", "^a+$"]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(KEYWORDS | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=25,
)
SCHEMAS = st.dictionaries(KEYWORDS, VALUES, max_size=5)


def check_taken_or_refused(schema: dict[str, Any], written: Any) -> None:
    try:
        grammar = written(response_format=named(schema))
    except InvalidRequest as refusal:
        assert refusal.param == SCHEMA
    else:
        assert json.loads(grammar)


PATTERNS = st.lists(
    st.sampled_from([*"ab.*+?|()[]{}^$\\/<>&~-,19é", "{1,9}", "(?i)", "[^a]", "\\p{L}", "(?:", "\\b", "\\d"]),
    min_size=1,
    max_size=12,
).map("".join)
LARK = st.lists(
    st.sampled_from(
        ["start", "a", "B", ": ", " | ", '"x"', "/[a-z]+/", "\n", "(", ")", "*", "+", "?", "{2,3}", "%json {}", "&",
         "~", "<[1]>", "//", "#", "%import common.INT", "[lazy]", "\nB: /b/\n", "\na: B\n"]
    ),
    max_size=14,
).map(lambda parts: "start: " + "".join(parts))  # fmt: skip


@pytest.mark.slow
@given(form=st.fixed_dictionaries({"regex": PATTERNS}) | st.fixed_dictionaries({"grammar": LARK}))
@hypothesis_settings(max_examples=800, deadline=None)
def test_any_pattern_and_any_grammar_is_taken_or_refused(form: dict[str, str], written: Any) -> None:
    (name,) = form
    try:
        grammar = written(structured=form)
    except InvalidRequest as refusal:
        assert refusal.param == f"structured.{name}"
    else:
        assert json.loads(grammar)


@given(schema=SCHEMAS)
@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_schema_is_taken_or_refused(schema: dict[str, Any], written: Any) -> None:
    check_taken_or_refused(schema, written)


@pytest.mark.slow
@given(schema=SCHEMAS)
@hypothesis_settings(max_examples=800, deadline=None)
def test_any_of_many_schemas_is_taken_or_refused(schema: dict[str, Any], written: Any) -> None:
    check_taken_or_refused(schema, written)
