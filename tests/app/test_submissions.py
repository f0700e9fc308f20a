"""Requests become submissions: bodies of jobs, and rows of batches in OpenAI's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from app import submissions
from app.errors import InvalidRequest, NotFound
from app.grammars import Grammars
from app.jobs import Submission
from app.models import Model
from app.prompts import Prompts
from app.settings import Settings
from app.submissions import JobRequest
from app.tiers import Plan, Tier

CHAT, COMPLETION = submissions.ROW_ENDPOINTS


@pytest.fixture(scope="module")
def prompts(model: Model) -> Prompts:
    return Prompts(model)


@pytest.fixture
def convert(model: Model, prompts: Prompts, settings: Settings) -> Any:
    grammars = Grammars(model)

    def to_submission(request: JobRequest) -> Submission:
        return submissions.to_submission(
            request, plan=Plan.PAID, model=model, prompts=prompts, grammars=grammars, settings=settings
        )

    return to_submission


MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_chat_row_is_the_same_job_as_its_messages(convert: Any) -> None:
    shared = {"messages": MESSAGES, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": "x", "metadata": {"a": "b"}}
    row = submissions.parse_row(CHAT, {**shared, "max_tokens": 9, "n": 1, "stream": False, "user": "u-1"})
    assert convert(row) == convert(submissions.parse({**shared, "max_tokens": 9}))


def test_a_completion_row_is_the_same_job_as_its_prompt(convert: Any) -> None:
    for prompt in ("hi", [104, 105]):
        row = submissions.parse_row(COMPLETION, {"prompt": prompt, "seed": 3, "model": "echo"})
        assert convert(row) == convert(submissions.parse({"prompt": "hi", "seed": 3}))


def test_the_newer_name_of_max_tokens_wins(convert: Any) -> None:
    row = submissions.parse_row(CHAT, {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 7})
    assert convert(row).sampling["max_tokens"] == 7


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": MESSAGES, "prompt": "hi"}, "prompt"),
        (CHAT, {"messages": MESSAGES, "stream": True}, "stream"),
        (CHAT, {"messages": MESSAGES, "n": 9}, "n"),
        (CHAT, {"messages": MESSAGES, "n": True}, "n"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"messages": MESSAGES, "tools": []}, "tools"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": MESSAGES, "webhook": {"url": "https://example.com"}}, "webhook"),
        (CHAT, {"messages": [{"role": "user", "content": [{"quote": "job_x"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": MESSAGES, "after": ["job_x"]}, "after"),
        (CHAT, {"messages": MESSAGES, "continue": "job_x"}, "continue"),
        (COMPLETION, {"prompt": [{"quote": "job_x"}]}, "prompt[0]"),
        (COMPLETION, {}, "prompt"),
        (COMPLETION, {"prompt": ["a", "b"]}, "prompt[0]"),
        (COMPLETION, {"prompt": "hi", "messages": MESSAGES}, "messages"),
        (COMPLETION, {"prompt": "hi", "stream": True}, "stream"),
    ],
)
def test_a_wrong_row_is_refused_by_the_name_of_its_field(endpoint: str, body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        submissions.parse_row(endpoint, body)
    assert refusal.value.param == f"body.{field}"


def test_a_row_with_another_model_is_refused(convert: Any) -> None:
    with pytest.raises(NotFound) as refusal:
        convert(submissions.parse_row(CHAT, {"messages": MESSAGES, "model": "gpt-5"}))
    assert refusal.value.param == "model"


def test_a_submission_holds_what_the_engine_needs(convert: Any, model: Model, settings: Settings) -> None:
    submission = convert(submissions.parse({"prompt": "hi", "max_tokens": 3, "seed": 7, "stop": ["a"], "top_k": 5}))
    assert submission == Submission(
        tier=Tier.PAID,
        model="echo",
        model_revision=model.revision,
        prompt_ids=(104, 105),
        sampling={
            "max_tokens": 3,
            "seed": 7,
            "top_k": 5,
            "stop": ("a",),
        },
        deadline_s=settings.tiers[Tier.PAID].deadline_s,
        metadata={},
    )


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "given"),
    #   context 8192: default 256 where it fits, else the rest; what is asked for must fit to the last token
    [(1, None, 256), (7936, None, 256), (7937, None, 255), (8191, None, 1), (1, 8191, 8191), (8191, 1, 1)],
)
def test_max_tokens_fill_what_the_context_leaves(
    convert: Any, prompt_tokens: int, asked: int | None, given: int
) -> None:
    request = submissions.parse({"prompt": [1] * prompt_tokens, "max_tokens": asked})
    assert convert(request).sampling["max_tokens"] == given
