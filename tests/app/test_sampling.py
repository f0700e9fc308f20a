"""The sampling fields of bodies: what the engine is told of them, and how wrong ones are refused."""

from __future__ import annotations

from typing import Any

import pytest

from app import submissions
from app.errors import InvalidRequest
from app.grammars import Grammars
from app.jobs import Submission
from app.models import Model
from app.prompts import Prompts
from app.rows import Desk, Line, encoded, row_of
from app.settings import Settings
from app.tiers import Plan

CHAT, COMPLETION = submissions.ROW_ENDPOINTS
MESSAGES = [{"role": "user", "content": "hi"}]
FIELDS = {
    "max_tokens": 9,
    "min_tokens": 2,
    "temperature": 0,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": -1,
    "frequency_penalty": 0.5,
    "logit_bias": {"7": -100, "65": 1.5},
    "allowed_token_ids": [66, 65, 66],
    "bad_words": ["no", " no"],
    "seed": 3,
    "stop": ["x", "yz"],
    "stop_token_ids": [10],
    "ignore_eos": True,
    "n": 3,
}
TOLD = {
    **{name: FIELDS[name] for name in ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed")},
    **{name: FIELDS[name] for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos")},
    "logit_bias": ((7, -100.0), (65, 1.5)),
    "allowed_ids": (65, 66),
    "bad_words": (tuple(b"no"),),  # " no" ends with it, and says nothing more
    "stop": ("x", "yz"),
    "stop_ids": (10,),
}


@pytest.fixture(scope="module")
def desk(settings: Settings, model: Model) -> Desk:
    return Desk(settings, model, Prompts(model), Grammars(model))


def submission_of(desk: Desk, body: dict[str, Any]) -> Submission:
    return submissions.to_submission(
        submissions.parse(body),
        plan=Plan.PAID,
        model=desk.model,
        prompts=desk.prompts,
        grammars=desk.grammars,
        settings=desk.settings,
    )


def row_submission_of(desk: Desk, endpoint: str, body: dict[str, Any]) -> Submission:
    content = encoded({"custom_id": "a", "method": "POST", "url": endpoint, "body": body})
    return desk.submission_of(row_of(Line(1, 0, content, False), endpoint=endpoint, max_bytes=100_000), endpoint)


def test_the_engine_is_told_all_fields_of_a_job_and_of_rows_alike(desk: Desk) -> None:
    logprobs = {"logprobs": True, "top_logprobs": 4}
    asked = [
        submission_of(desk, {"prompt": "hi"} | FIELDS | logprobs),
        row_submission_of(desk, CHAT, {"messages": MESSAGES} | FIELDS | logprobs),
        row_submission_of(desk, COMPLETION, {"prompt": "hi"} | FIELDS | {"logprobs": 4}),
    ]
    for submission in asked:
        assert submission.sampling == TOLD | {"top_logprobs": 4}
        assert (submission.num_choices, submission.has_logprobs) == (3, True)
        assert submission.most_tokens == len(submission.prompt_ids) + 3 * 9


def test_only_what_is_given_is_stored(desk: Desk) -> None:
    nothing = dict.fromkeys(("top_k", "min_p", "presence_penalty", "min_tokens"), 0) | {"bad_words": [], "stop": []}
    plain = submission_of(desk, {"prompt": "hi", "seed": 3, "ignore_eos": False, "logprobs": False} | nothing)
    assert plain.sampling == {"max_tokens": 256, "seed": 3}
    assert (plain.num_choices, plain.has_logprobs) == (1, False)


@pytest.mark.parametrize(
    ("fields", "top"),
    [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20), ({"logprobs": False}, None), ({}, None)],
)
def test_logprobs_of_jobs_and_chats_are_asked_for_apart_from_the_likeliest(
    desk: Desk, fields: dict[str, Any], top: int | None
) -> None:
    assert submission_of(desk, {"prompt": "hi"} | fields).sampling.get("top_logprobs") == top
    assert row_submission_of(desk, CHAT, {"messages": MESSAGES} | fields).sampling.get("top_logprobs") == top


BAD: list[tuple[dict[str, Any], str]] = [
    # the echo model's tokens are 0…258
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 10, "max_tokens": 9}, "min_tokens"),
    ({"min_tokens": 257}, "min_tokens"),  # of the 256 that are the default
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": True}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 11}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"259": 1}}, "logit_bias.259"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"01": 1}}, "logit_bias.01"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"logit_bias": {"7": 100.5}}, "logit_bias.7"),
    ({"logit_bias": {"7": None}}, "logit_bias.7"),
    ({"logit_bias": {"7": True}}, "logit_bias.7"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1, 259]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": ["1"]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1, True]}, "stop_token_ids[1]"),
    ({"stop_token_ids": 1}, "stop_token_ids"),
    ({"bad_words": "no"}, "bad_words"),
    ({"bad_words": ["no", ""]}, "bad_words[1]"),
    ({"bad_words": ["x" * 257]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 65}, "bad_words"),
    ({"stop": ["x", ""]}, "stop[1]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": 1.0}, "n"),
    ({"n": True}, "n"),
]
BAD_LOGPROBS: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
]
BAD_ROWS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETION, {"logprobs": True}, "logprobs"),
    (COMPLETION, {"logprobs": 6}, "logprobs"),
    (COMPLETION, {"logprobs": -1}, "logprobs"),
    (COMPLETION, {"top_logprobs": 1}, "top_logprobs"),
    (CHAT, {"max_completion_tokens": 9000}, "max_completion_tokens"),
    (CHAT, {"max_tokens": 9000}, "max_tokens"),
    *((CHAT, fields, field) for fields, field in [*BAD, *BAD_LOGPROBS]),
    *((COMPLETION, fields, field) for fields, field in BAD),
]


@pytest.mark.parametrize(("fields", "field"), [*BAD, *BAD_LOGPROBS])
def test_a_wrong_field_is_named_as_the_client_wrote_it(desk: Desk, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        submission_of(desk, {"prompt": "hi"} | fields)
    assert refusal.value.param == field
    assert refusal.value.message.startswith(field)


@pytest.mark.parametrize(("endpoint", "fields", "field"), BAD_ROWS)
def test_a_wrong_field_of_a_row_is_named_with_its_place_in_the_line(
    desk: Desk, endpoint: str, fields: dict[str, Any], field: str
) -> None:
    prompt: dict[str, Any] = {"messages": MESSAGES} if endpoint == CHAT else {"prompt": "hi"}
    with pytest.raises(InvalidRequest) as refusal:
        row_submission_of(desk, endpoint, prompt | fields)
    assert refusal.value.param == f"body.{field}"
    assert f"body.{field}" in refusal.value.message
