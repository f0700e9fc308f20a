"""Grammars for tests, and what an engine has made by them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher

from engine.request import Output

BOUND_S = 60.0
"""How long a test waits for what must happen."""


def schema(value: Any) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(value), overrides={"whitespace_flexible": False})


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


class Collector:
    """Keeps what the engine hands over, and lets a test wait for it."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[Output]] = {}
        self._changed = threading.Condition()

    def __call__(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            for output in outputs:
                known = self.outputs.setdefault(output.request_id, [])
                assert not known or known[-1].finish is None, "something came after the end"
                known.append(output)
            self._changed.notify_all()

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(predicate, BOUND_S), "it did not happen"

    def end_of(self, request_id: str) -> Output:
        self.wait_for(lambda: request_id in self.outputs and self.outputs[request_id][-1].finish is not None)
        return self.outputs[request_id][-1]

    def text(self, request_id: str) -> str:
        return "".join(output.text for output in self.outputs[request_id])

    def tokens(self, request_id: str) -> tuple[int, ...]:
        return tuple(token_id for output in self.outputs[request_id] for token_id in output.token_ids)
