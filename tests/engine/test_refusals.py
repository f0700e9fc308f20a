"""What cannot be computed is refused with a sentence that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.refusals import problem_of
from engine.request import Request, Sampling


def refusal(prompt_ids: tuple[int, ...] = (1, 2), resumed_ids: tuple[int, ...] = (), **fields: Any) -> str | None:
    request = Request("a", prompt_ids, Sampling(**{"max_tokens": 5} | fields), resumed_ids=resumed_ids)
    return problem_of(request, context_length=10, vocab_size=100)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0, "min_p": 1, "top_p": 1, "seed": 2**63 - 1, "choice": 2**31 - 1, "top_logprobs": 20},
        {"temperature": 1e-320, "top_p": 1e-320, "top_k": 10**12, "max_tokens": 10**12, "min_tokens": 10**12},
        {"logit_bias": ((0, -100), (99, 100.5)), "allowed_ids": (0, 99), "bad_words": ((99,), (0, 1, 2))},
        {"stop_ids": (0, 99), "prompt_ids": (0, 99), "resumed_ids": (99,), "top_logprobs": 0},
    ],
    ids=str,
)
def test_what_can_be_computed_is(fields: dict[str, Any]) -> None:
    assert refusal(**fields) is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt_ids": ()}, "The prompt has no tokens."),
        ({"prompt_ids": (1,) * 10}, "The prompt has 10 tokens; a context of 10 has no room to answer it."),
        ({"prompt_ids": (1, 100)}, "prompt_ids names token 100; the model has tokens 0 to 99."),
        ({"resumed_ids": (1, -1)}, "resumed_ids names token -1; the model has tokens 0 to 99."),
        ({"allowed_ids": (5, 2**40)}, f"allowed_ids names token {2**40}; the model has tokens 0 to 99."),
        ({"bad_words": ((1,), (2, 100))}, "bad_words names token 100; the model has tokens 0 to 99."),
        ({"stop_ids": (100,)}, "stop_ids names token 100; the model has tokens 0 to 99."),
        ({"logit_bias": ((100, 1.0),)}, "logit_bias names token 100; the model has tokens 0 to 99."),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias names a token twice."),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias is nan; it lies between -1e+06 and 1e+06."),
        ({"logit_bias": ((1, -math.inf),)}, "logit_bias is -inf; it lies between -1e+06 and 1e+06."),
        ({"max_tokens": 0}, "max_tokens is 0; it lies between 1 and inf."),
        ({"temperature": -0.1}, "temperature is -0.1; it lies between 0 and 1e+06."),
        ({"temperature": math.nan}, "temperature is nan; it lies between 0 and 1e+06."),
        ({"top_k": -1}, "top_k is -1; it lies between 0 and inf."),
        ({"top_p": 0.0}, "top_p is 0.0; it lies above 0, and is 1 at most."),
        ({"min_p": 1.01}, "min_p is 1.01; it lies between 0 and 1."),
        ({"seed": -1}, "seed is -1; it lies between 0 and 9.22337e+18."),
        ({"choice": 2**31}, "choice is 2147483648; it lies between 0 and 2.14748e+09."),
        ({"min_tokens": -1}, "min_tokens is -1; it lies between 0 and inf."),
        ({"top_logprobs": 21}, "top_logprobs is 21; it lies between 0 and 20."),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it lies between 1e-06 and 1e+06."),
        ({"presence_penalty": math.inf}, "presence_penalty is inf; it lies between -1e+06 and 1e+06."),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan; it lies between -1e+06 and 1e+06."),
        ({"allowed_ids": ()}, "allowed_ids allows no token."),
        ({"bad_words": ((1,), ())}, "A sequence of bad_words has no tokens."),
        ({"stop": ("a", "")}, "A stop string is empty."),
    ],
    ids=str,
)
def test_what_cannot_is_refused_by_name(fields: dict[str, Any], sentence: str) -> None:
    assert refusal(**fields) == sentence
