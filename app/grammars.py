"""What form a text must have: these fields of a request's body → one llguidance grammar, tried before it is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from llguidance import LLMatcher
from pydantic import Discriminator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from app.bodies import Body
from app.errors import InvalidRequest
from app.models import Model
from app.trials import Trials

MAX_GRAMMAR_BYTES = 1 << 16
"""Of a schema as JSON, of a grammar, of all choices together."""
MAX_SCHEMA_NODES = 4096
"""Objects, arrays and values of a schema, keys not counted."""
MAX_PATTERN_LENGTH = 4096
"""Characters of a regular expression, and of each one in a schema."""
MAX_CHOICES = 1024

_JSON: dict[str, Any] = {"whitespace_flexible": False}
"""No free white space, so that a schema of bounded texts has bounded texts."""
_LARK_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|#[^\n]*')
"""Strings, regular expressions and comments of a Lark grammar."""

Schema = Annotated[dict[str, Any], Field(alias="schema")]


class Text(Body):
    """Any text."""

    type: Literal["text"]


class JsonObject(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A schema, with a name for the model."""

    name: Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str, Field(max_length=1024)] | None = None
    json_schema: Schema
    strict: bool | None = None
    """Ignored: it always is."""


class JsonSchema(Body):
    """JSON that the schema allows."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Structured(Body):
    """Exactly one of these."""

    json_schema: dict[str, Any] | None = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_LENGTH)] | None = None
    """In the syntax of Rust's regex crate; the whole text matches it."""
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)] | None = (
        None
    )
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """In llguidance's dialect of Lark."""

    @model_validator(mode="after")
    def _is_one(self) -> Structured:
        if len([name for name in type(self).model_fields if getattr(self, name) is not None]) != 1:
            raise PydanticCustomError("not_one", "Input should have exactly one of json_schema, regex, choice, grammar")
        return self


class GrammarFields(Body):
    """As requests say which form their texts must have."""

    response_format: Annotated[Text | JsonObject | JsonSchema, Discriminator("type")] | None = None
    structured: Structured | None = None

    @model_validator(mode="after")
    def _says_it_once(self) -> GrammarFields:
        if self.structured is not None and not isinstance(self.response_format, Text | None):
            raise InvalidRequest("Give either structured or response_format", param="structured")
        return self


class Grammars:
    """Turns these fields into grammars that the model's engine can keep to. Threads may share it."""

    def __init__(self, model: Model) -> None:
        self._trials = Trials(model.directory, model.vocab_size)

    def of(self, fields: GrammarFields) -> str | None:
        """The grammar, or None for a text of any form.

        Raises InvalidRequest, naming the field, where it is too large, wrong, or takes too long; Unavailable.
        """
        field, grammar = _written(fields)
        if grammar is None:
            return None
        if problem := self._trials.problem_of(grammar):
            raise InvalidRequest(f"{field}: {problem}", param=field)
        return grammar

    def close(self) -> None:
        self._trials.close()


def _written(fields: GrammarFields) -> tuple[str, str | None]:
    """The field that asks for a form, and its grammar, checked for its size alone."""
    match fields.response_format, fields.structured:
        case JsonObject(), _:
            return "response_format", _json_grammar({"type": "object"}, "response_format")
        case JsonSchema(json_schema=named), _:
            field = "response_format.json_schema.schema"
            return field, _json_grammar(named.json_schema, field)
        case _, Structured(json_schema=dict(schema)):
            return "structured.json_schema", _json_grammar(schema, "structured.json_schema")
        case _, Structured(regex=str(regex)):
            return "structured.regex", _regex_grammar(regex)
        case _, Structured(choice=list(choices)):
            return "structured.choice", _choice_grammar(choices)
        case _, Structured(grammar=str(lark)):
            return "structured.grammar", _lark_grammar(lark)
    return "", None


def _json_grammar(schema: dict[str, Any], field: str) -> str:
    for number, (key, value) in enumerate(_nodes(schema, ""), start=1):
        if number > MAX_SCHEMA_NODES:
            raise InvalidRequest(f"{field} has more than {MAX_SCHEMA_NODES} nodes", param=field)
        if key == "x-guidance":
            raise InvalidRequest(f"{field}: x-guidance is not supported", param=field)
        is_pattern = key == "pattern" and isinstance(value, str) and len(value) > MAX_PATTERN_LENGTH
        has_pattern = key == "patternProperties" and isinstance(value, dict)
        if is_pattern or (has_pattern and max(map(len, value), default=0) > MAX_PATTERN_LENGTH):
            raise InvalidRequest(f"{field}: a pattern is longer than {MAX_PATTERN_LENGTH} characters", param=field)
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    _check_size(text, field)
    return LLMatcher.grammar_from_json_schema(text, overrides=_JSON)  # type: ignore[arg-type]


def _regex_grammar(regex: str) -> str:
    if len(regex) - len(regex.rstrip("\\")) & 1:  # it would escape what llguidance writes behind it
        raise InvalidRequest("structured.regex: it ends with a lone backslash", param="structured.regex")
    return LLMatcher.grammar_from_regex(regex)


def _choice_grammar(choices: list[str]) -> str:
    _check_size("".join(choices), "structured.choice")
    return LLMatcher.grammar_from_regex("|".join(map(_literal, dict.fromkeys(choices))))


def _literal(text: str) -> str:
    """A regular expression for this text alone."""
    return "".join(each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)


def _lark_grammar(lark: str) -> str:
    _check_size(lark, "structured.grammar")
    if "<" in _LARK_LITERAL.sub("", lark):  # <|im_end|>, <[5]>; the engine masks what would slip through here
        raise InvalidRequest("structured.grammar: single tokens cannot be named", param="structured.grammar")
    # Not as it is: llguidance would take what begins with a brace for its own format.
    return json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False)


def _check_size(text: str, field: str) -> None:
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{field} is larger than {MAX_GRAMMAR_BYTES} bytes", param=field)


def _nodes(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """A value of JSON and all within it, each with the key that it stands at."""
    yield key, value
    match value:
        case dict():
            for inner_key, inner in value.items():
                yield from _nodes(inner, inner_key)
        case list():
            for inner in value:
                yield from _nodes(inner, "")
