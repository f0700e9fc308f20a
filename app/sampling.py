"""How tokens are chosen, and when they end: these fields of a request's body, and what the engine is told of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from app.bodies import Body, text_or_list
from app.errors import InvalidRequest
from app.prompts import Prompts

MAX_CHOICES = 8
"""Of one job."""
MAX_TOP_LOGPROBS = 20
MAX_TOKEN_IDS = 1024
"""In one field."""
MAX_STRINGS = 16
"""In stop; four times as many bad words."""


MaxTokens = Annotated[int, Field(ge=1)]
TokenIds = Annotated[list[int], Field(min_length=1, max_length=MAX_TOKEN_IDS)]
ShortString = Annotated[str, Field(min_length=1, max_length=256)]
StopStrings = Annotated[
    Annotated[ShortString, Tag("text")] | Annotated[list[ShortString], Field(max_length=MAX_STRINGS), Tag("list")],
    Discriminator(
        text_or_list,
        custom_error_type="stop_type",
        custom_error_message="Input should be a string or a list of strings",
    ),
]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_TOKEN_IDS),
]


class SamplingFields(Body):
    """Those that every way to ask for text has."""

    max_tokens: MaxTokens | None = None
    """Of each choice. Default: 256, or what still fits the model's context."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """No end-of-sequence token and no stop token comes before so many."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 is greedy. Default: 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Default: 1."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """0 keeps all. Default: 0."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Tokens less likely than so much of the likeliest are left out. Default: 0."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    """Default: 1, none."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    """Added to the logits, by token id."""
    allowed_token_ids: TokenIds | None = None
    """No others are chosen."""
    bad_words: Annotated[list[ShortString], Field(max_length=4 * MAX_STRINGS)] | None = None
    """Not generated, neither alone nor behind a space."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Default: drawn at random."""
    stop: StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    """End the text as the end-of-sequence token does."""
    ignore_eos: bool | None = None
    """Default: false."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Choices. Default: 1."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        match self.stop:
            case None:
                return ()
            case str():
                return (self.stop,)
        return tuple(self.stop)


class LogprobFields(Body):
    """As jobs and chat completions ask for logprobs."""

    logprobs: bool | None = None
    """Default: false."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """So many of the likeliest tokens at each place. Default: 0."""

    @field_validator("top_logprobs")
    @classmethod
    def _comes_with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("logprobs") is not True:
            raise PydanticCustomError("needs_logprobs", "It needs logprobs to be true")
        return value

    @property
    def num_top_logprobs(self) -> int | None:
        """None: no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


def to_sampling(
    fields: SamplingFields,
    *,
    max_tokens: int,
    top_logprobs: int | None,
    prompts: Prompts,
    vocab_size: int,
    grammar: str | None = None,
) -> dict[str, Any]:
    """The fields of engine.request.Sampling, those that were given, and always max_tokens and a seed.

    max_tokens is what they come to. Raises InvalidRequest, naming the field.
    """
    if (fields.min_tokens or 0) > max_tokens:
        raise InvalidRequest(f"min_tokens may be at most max_tokens, which is {max_tokens}", param="min_tokens")
    bias = fields.logit_bias or {}
    _check(((f"logit_bias.{token}", int(token)) for token in bias), vocab_size)
    asked = {
        "min_tokens": fields.min_tokens,
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": fields.top_k,
        "min_p": fields.min_p,
        "repetition_penalty": fields.repetition_penalty,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "logit_bias": tuple((int(token), value) for token, value in bias.items()),
        "allowed_ids": _ids(fields.allowed_token_ids, "allowed_token_ids", vocab_size),
        "bad_words": _bad_words(fields.bad_words or [], prompts),
        "stop": fields.stop_strings,
        "stop_ids": _ids(fields.stop_token_ids, "stop_token_ids", vocab_size),
        "ignore_eos": fields.ignore_eos,
        "grammar": grammar,
    }
    return {
        "max_tokens": max_tokens,
        "seed": secrets.randbits(63) if fields.seed is None else fields.seed,
        **{name: value for name, value in asked.items() if value},
        **({} if fields.temperature is None else {"temperature": fields.temperature}),
        **({} if top_logprobs is None else {"top_logprobs": top_logprobs}),
    }


def _ids(ids: list[int] | None, field: str, vocab_size: int) -> tuple[int, ...]:
    ids = ids or []
    _check(((f"{field}[{place}]", token_id) for place, token_id in enumerate(ids)), vocab_size)
    return tuple(sorted(set(ids)))


def _check(ids: Iterable[tuple[str, int]], vocab_size: int) -> None:
    for path, token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{path} is not one of the model's tokens, 0…{vocab_size - 1}", param=path)


def _bad_words(words: list[str], prompts: Prompts) -> tuple[tuple[int, ...], ...]:
    spelled: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(words):
        of_word = prompts.of_word(word)
        if not of_word:
            path = f"bad_words[{place}]"
            raise InvalidRequest(f"{path} has no tokens", param=path)
        spelled.update(dict.fromkeys(of_word))
    return tuple(spelled)
