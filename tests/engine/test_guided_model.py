"""Texts of a form by the real model, at temperature 1: each one is valid, whatever the model would rather say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine.builder import build
from engine.config import EngineConfig
from engine.request import Finish, Request, Sampling
from tests.guiding import Collector, schema

WORD = {"type": "string", "maxLength": 16}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "enums": {"type": "array", "items": {"enum": ["red", "green", 7, None]}, "minItems": 2, "maxItems": 4},
    "nested": {
        "type": "object",
        "properties": {
            "points": {
                "type": "array",
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {axis: {"type": "integer", "minimum": -99, "maximum": 99} for axis in "xyz"},
                    "required": ["x", "y"],
                    "additionalProperties": False,
                },
            },
            "ok": {"type": "boolean"},
        },
        "required": ["points", "ok"],
        "additionalProperties": False,
    },
    "patterns": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
            "on": {"type": "string", "format": "date"},
        },
        "required": ["id", "on"],
        "additionalProperties": False,
    },
    "union": {
        "anyOf": [
            {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"enum": [7, 9]}},
             "required": ["kind", "lives"], "additionalProperties": False},
            {"type": "object", "properties": {"kind": {"const": "dog"}, "name": WORD},
             "required": ["kind", "name"], "additionalProperties": False},
        ]
    },
    "tree": {
        "$defs": {
            "node": {"type": "object", "properties": {"v": {"enum": [0, 1]}, "next": {"$ref": "#/$defs/leaf"}},
                     "required": ["v"], "additionalProperties": False},
            "leaf": {"type": ["object", "null"], "properties": {"v": {"enum": [0, 1]}}, "additionalProperties": False},
        },
        "$ref": "#/$defs/node",
    },
    "letters": {"type": "object", "properties": {"ä€😀": {"enum": ["é😀", "<|im_end|>"]}}, "required": ["ä€😀"],
                "additionalProperties": False},
    "number": {"type": ["integer", "boolean"], "minimum": 10, "maximum": 99},
}  # fmt: skip
FORMS = {
    "regex": (LLMatcher.grammar_from_regex(r"\w{1,9} 😀? (yes|no)!"), r"\w{1,9} 😀? (yes|no)!"),
    "choice": (LLMatcher.grammar_from_regex("north|south|👩‍👩‍👧"), "north|south|👩‍👩‍👧"),
    "lark": (
        LLMatcher.grammar_from_lark('start: sum "="\nsum: NUM ("+" NUM){1,4}\nNUM: /[1-9][0-9]?/'),
        r"[1-9][0-9]?(\+[1-9][0-9]?){1,4}=",
    ),
}


class Machine:
    """An engine with the real model, as a function of requests."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.collector = Collector()
        self.engine = build(EngineConfig(directory, kv_cache_gib=0.2, max_num_seqs=16))
        self.engine.start(self.collector)

    def request(self, name: str, grammar: str, seed: int, **fields: Any) -> Request:
        prompt = "<|im_start|>user\nSay something of the kind.<|im_end|>\n<|im_start|>assistant\n"
        return Request(
            name, tuple(self.tokenizer.encode(prompt).ids), Sampling(300, seed=seed, grammar=grammar), **fields
        )

    def run(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.submit(request)
        for request in requests:
            end = self.collector.end_of(request.id)
            assert end.finish is Finish.STOP, (request.id, end)


@pytest.fixture(scope="module")
def machine(smollm2_dir: Path) -> Iterator[Machine]:
    opened = Machine(smollm2_dir)
    yield opened
    opened.engine.close()


def check_valid(machine: Machine, name: str, value: dict[str, Any]) -> None:
    text = machine.collector.text(name)
    assert "\ufffd" not in text
    jsonschema.validate(json.loads(text), value)
    # No control token but an end: the text of all tokens is what was shown.
    assert machine.tokenizer.decode(machine.collector.tokens(name), skip_special_tokens=False) == text


def test_each_form_is_kept_to(machine: Machine) -> None:
    requests = [machine.request(f"few {name}", schema(value), seed=1) for name, value in SCHEMAS.items()]
    requests += [machine.request(f"few {name}", grammar, seed=2) for name, (grammar, _) in FORMS.items()]
    machine.run(requests)
    for name, value in SCHEMAS.items():
        check_valid(machine, f"few {name}", value)
    for name, (_, pattern) in FORMS.items():
        assert re.fullmatch(pattern, machine.collector.text(f"few {name}"))


@pytest.mark.slow
def test_two_hundred_texts_are_valid(machine: Machine) -> None:
    kinds = list(SCHEMAS.items())
    requests = [
        machine.request(f"many {seed}", schema(kinds[seed % len(kinds)][1]), seed=seed, rank=seed % 3)
        for seed in range(200)
    ]
    machine.run(requests)
    for seed in range(200):
        check_valid(machine, f"many {seed}", kinds[seed % len(kinds)][1])
    texts = {machine.collector.text(f"many {seed}") for seed in range(0, 200, len(kinds))}
    assert len(texts) > 15  # of 25 persons
    for seed in range(0, 200, 10):  # as an attempt that resumes in the middle
        whole = machine.collector.tokens(f"many {seed}")
        rest = machine.request(f"rest {seed}", schema(kinds[seed % len(kinds)][1]), seed, resumed_ids=whole[:5])
        if len(whole) > 5:
            machine.run([rest])
            text = machine.tokenizer.decode([*whole[:5], *machine.collector.tokens(rest.id)])
            jsonschema.validate(json.loads(text), kinds[seed % len(kinds)][1])
