"""What is refused raises the client's own exception for it, which tells what was wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from given import GIVEN, NewClient

MESSAGES = [{"role": "user", "content": "x"}]
ASKED: dict[str, Any] = {"model": "echo", "messages": MESSAGES, "max_tokens": 4}


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as refused:
        call(*args, **kwargs)
    return refused.value


def check(
    error: openai.APIStatusError, kind: type[openai.APIStatusError], *, status: int, code: str, param: str | None
) -> None:
    assert type(error) is kind
    assert (error.status_code, error.code, error.param) == (status, code, param)
    assert error.request_id and error.request_id == error.response.headers["x-request-id"]
    assert error.response.json()["error"]["message"] in error.message
    assert error.type == {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}.get(
        status, "invalid_request_error"
    )


def test_400_a_body_that_is_no_object(client: Any) -> None:
    error = refusal(client.post, "/chat/completions", cast_to=object, body=["x"])
    check(error, openai.BadRequestError, status=400, code="malformed_body", param=None)


def test_401_another_key(new_client: NewClient) -> None:
    error = refusal(new_client(api_key="sk-none").chat.completions.create, **ASKED)
    check(error, openai.AuthenticationError, status=401, code="invalid_api_key", param=None)


def test_403_a_tier_that_the_plan_does_not_have(new_client: NewClient) -> None:
    free = new_client(api_key=GIVEN.free_key)
    for make, asked in (
        (free.chat.completions.create, ASKED),
        (free.responses.create, {"model": "echo", "input": "x"}),
    ):
        error = refusal(make, **asked, service_tier="priority")
        check(error, openai.PermissionDeniedError, status=403, code="forbidden", param="service_tier")
    assert free.chat.completions.create(**ASKED).service_tier == "default"


def test_403_a_key_of_another_scope(new_client: NewClient) -> None:
    error = refusal(new_client(api_key=GIVEN.admin_key).models.list)
    check(error, openai.PermissionDeniedError, status=403, code="forbidden", param=None)


def test_404_another_model(client: Any) -> None:
    for make, asked in (
        (client.chat.completions.create, ASKED),
        (client.completions.create, {"prompt": "x"}),
        (client.responses.create, {"input": "x"}),
    ):
        error = refusal(make, **asked | {"model": "gpt-5"})
        check(error, openai.NotFoundError, status=404, code="not_found", param="model")


def test_404_a_route_that_is_none(client: Any) -> None:
    error = refusal(client.embeddings.create, model="echo", input="x")
    check(error, openai.NotFoundError, status=404, code="not_found", param=None)


def test_404_what_is_somebody_elses(client: Any, new_client: NewClient) -> None:
    file = client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
    response = client.responses.create(model="echo", input="x", max_output_tokens=1)
    other = new_client(api_key=GIVEN.free_key)
    for read, their_id in ((other.files.content, file.id), (other.responses.retrieve, response.id)):
        check(refusal(read, their_id), openai.NotFoundError, status=404, code="not_found", param="id")


def test_409_what_has_ended(client: Any) -> None:
    response = client.responses.create(model="echo", input="x", max_output_tokens=1)
    error = refusal(client.responses.cancel, response.id)
    check(error, openai.ConflictError, status=409, code="conflict", param=None)
    assert error.response.headers["x-should-retry"] == "false"


def test_413_a_body_that_is_too_large(client: Any) -> None:
    error = refusal(client.chat.completions.create, **ASKED | {"user": "x" * 1_000_000})
    check(error, openai.APIStatusError, status=413, code="payload_too_large", param=None)


def test_422_a_field_that_is_wrong(client: Any) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]
    messages = [*MESSAGES, {"role": "user", "content": parts}]
    error = refusal(client.chat.completions.create, **ASKED | {"messages": messages})
    check(
        error,
        openai.UnprocessableEntityError,
        status=422,
        code="invalid_request",
        param="messages[1].content[1].type",
    )


def test_429_too_many_requests_in_a_minute(new_client: NewClient) -> None:
    rated = new_client(api_key=GIVEN.rated_key)
    errors = []
    for _ in range(2):  # the first one may have gone through
        try:
            rated.chat.completions.create(**ASKED)
        except openai.APIStatusError as refused:
            errors.append(refused)
    check(errors[-1], openai.RateLimitError, status=429, code="rate_limit_exceeded", param=None)
    headers = errors[-1].response.headers
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("1", "0")
    assert 0 < int(headers["retry-after"]) <= 60


def test_429_more_tokens_than_are_left_today(new_client: NewClient) -> None:
    poor = new_client(api_key=GIVEN.poor_key)
    error = refusal(poor.responses.create, model="echo", input="x", max_output_tokens=100)
    check(error, openai.RateLimitError, status=429, code="quota_exceeded", param=None)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_500_a_job_that_did_not_succeed(client: Any, is_streamed: bool) -> None:
    asked = {**ASKED, "max_tokens": 4000, "extra_body": {"deadline": 0.001}}
    if not is_streamed:
        error = refusal(client.chat.completions.create, **asked)
        check(error, openai.InternalServerError, status=500, code="deadline_exceeded", param=None)
        assert error.body["job_id"].startswith("job_")
        return
    with pytest.raises(openai.APIError) as raised:
        list(client.chat.completions.create(**asked, stream=True))
    assert (raised.value.code, raised.value.type) == ("deadline_exceeded", "server_error")
    assert raised.value.message
