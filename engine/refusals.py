"""Why a request cannot be computed: one sentence for its caller, in place of a step that fails for everybody.

The door of the service checks the same in its own words; this is the engine's own guard, for whoever submits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from engine.request import MAX_TOP_LOGPROBS, Request, Sampling

_LARGEST = 1e6
"""Of penalties, biases and temperatures: beyond it a logit in fp32 would no longer be a number."""


def problem_of(request: Request, *, context_length: int, vocab_size: int | None) -> str | None:
    """Why it cannot be computed, or None.

    context_length  positions that a sequence may have
    vocab_size      token ids are below it; None: they are not looked at
    """
    num_prompt = len(request.prompt_ids)
    if not num_prompt:
        return "The prompt has no tokens."
    if num_prompt >= context_length:
        return f"The prompt has {num_prompt} tokens; a context of {context_length} has no room to answer it."
    return next(_problems_of(request.sampling), None) or next(_unknown_ids(request, vocab_size), None)


def _problems_of(sampling: Sampling) -> Iterator[str]:
    """What is wrong with its numbers."""
    for name, value, least, most in (
        ("max_tokens", sampling.max_tokens, 1, math.inf),
        ("temperature", sampling.temperature, 0, _LARGEST),
        ("top_k", sampling.top_k, 0, math.inf),
        ("min_p", sampling.min_p, 0, 1),
        ("seed", sampling.seed, 0, 2**63 - 1),
        ("choice", sampling.choice, 0, 2**31 - 1),
        ("min_tokens", sampling.min_tokens, 0, math.inf),
        ("top_logprobs", sampling.top_logprobs or 0, 0, MAX_TOP_LOGPROBS),
        ("repetition_penalty", sampling.repetition_penalty, 1 / _LARGEST, _LARGEST),
        ("presence_penalty", sampling.presence_penalty, -_LARGEST, _LARGEST),
        ("frequency_penalty", sampling.frequency_penalty, -_LARGEST, _LARGEST),
        *(("logit_bias", bias, -_LARGEST, _LARGEST) for _, bias in sampling.logit_bias),
    ):
        if not least <= value <= most:  # so is what is not a number
            yield f"{name} is {value}; it lies between {least:g} and {most:g}."
    if not 0 < sampling.top_p <= 1:
        yield f"top_p is {sampling.top_p}; it lies above 0, and is 1 at most."
    if sampling.allowed_ids is not None and not sampling.allowed_ids:
        yield "allowed_ids allows no token."
    if not all(sampling.bad_words):
        yield "A sequence of bad_words has no tokens."
    if not all(sampling.stop):
        yield "A stop string is empty."
    if len({token_id for token_id, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        yield "logit_bias names a token twice."


def _unknown_ids(request: Request, vocab_size: int | None) -> Iterator[str]:
    """Token ids that are none, by the field that names them."""
    if vocab_size is None:
        return
    sampling = request.sampling
    named: tuple[tuple[str, Sequence[int]], ...] = (
        ("prompt_ids", request.prompt_ids),
        ("resumed_ids", request.resumed_ids),
        ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ("allowed_ids", sampling.allowed_ids or ()),
        ("bad_words", [token_id for word in sampling.bad_words for token_id in word]),
        ("stop_ids", sampling.stop_ids),
    )
    for name, ids in named:
        for extreme in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= extreme < vocab_size:
                yield f"{name} names token {extreme}; the model has tokens 0 to {vocab_size - 1}."
