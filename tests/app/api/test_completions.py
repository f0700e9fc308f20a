"""/v1/chat/completions and /v1/completions, as the stock client speaks to them, over a whole running service."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from app.children import wait_until
from app.client import Client
from app.supervisor import Ready

MESSAGES: Any = [{"role": "user", "content": "Why?"}]


@pytest.fixture
def client(service: Ready) -> Iterator[openai.OpenAI]:
    """The stock client, which refuses an answer that is not of its types."""
    with _client(service, service.access.paid_key) as client:
        yield client


@pytest.fixture
def jobs(service: Ready) -> Iterator[Client]:
    with Client(service.access.url, service.access.paid_key) as jobs:
        yield jobs


def _client(service: Ready, key: str) -> openai.OpenAI:
    url = f"{service.access.url}/v1"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, _strict_response_validation=True)


def job_id_of(completion_id: str) -> str:
    return f"job_{completion_id.partition('-')[2]}"


def test_a_chat_is_waited_for(client: openai.OpenAI, jobs: Client) -> None:
    done = client.chat.completions.create(model="echo", messages=MESSAGES, max_completion_tokens=6, seed=1, n=2)
    job = jobs.get(job_id_of(done.id))
    assert [choice.message.content for choice in done.choices] == [each["text"] for each in job["output"]["choices"]]
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == job["usage"]["completion_tokens"] == 12


def test_a_streamed_chat_joins_to_the_one_that_is_waited_for(client: openai.OpenAI) -> None:
    asked: Any = {"model": "echo", "messages": MESSAGES, "max_tokens": 9, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        mine = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content
        assert [each.finish_reason for each in mine if each.finish_reason] == [choice.finish_reason]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_streamed_text_has_the_offsets_of_the_whole(service: Ready) -> None:
    asked = {"model": "echo", "prompt": "x", "max_tokens": 9, "seed": 3, "logprobs": 1, "stream": True}
    chunks = sse(service, "/v1/completions", asked)
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks[:-1]]
    assert chunks[-1] == "[DONE]"
    text = "".join(choice["text"] for choice in choices)
    told = [
        (token, offset)
        for choice in choices
        for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
    ]
    assert len(told) == 9
    assert all(text[offset : offset + len(token)] == token for token, offset in told)
    assert choices[-1]["finish_reason"] == "length"


def test_the_tier_is_told_in_openais_words(client: openai.OpenAI, jobs: Client, service: Ready) -> None:
    for asked, shown, tier in (("auto", "default", "paid"), ("flex", "flex", "bulk"), ("priority", "priority", "paid")):
        done = client.chat.completions.create(
            model="echo",
            messages=MESSAGES,
            max_tokens=1,
            service_tier=asked,  # type: ignore[call-overload]
        )
        assert (done.service_tier, jobs.get(job_id_of(done.id))["tier"]) == (shown, tier)
    with _client(service, service.access.free_key) as free, pytest.raises(openai.PermissionDeniedError) as refused:
        free.chat.completions.create(model="echo", messages=MESSAGES, service_tier="priority")
    assert refused.value.param == "service_tier"


def test_a_client_that_goes_away_cancels_its_job(service: Ready, jobs: Client) -> None:
    for is_streamed in (True, False):
        seen = {job["id"] for job in jobs.jobs()}
        body = {"model": "echo", "messages": MESSAGES, "max_tokens": 2000, "stream": is_streamed}
        with httpx.Client(trust_env=False, headers=authorized(service), timeout=1.0) as http:
            url = f"{service.access.url}/v1/chat/completions"
            if is_streamed:
                with http.stream("POST", url, json=body) as answer:
                    next(answer.iter_raw())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(url, json=body)
        (job_id,) = {job["id"] for job in jobs.jobs()} - seen
        assert wait_until(has_status(jobs, job_id, "cancelled"), 30), is_streamed


def test_a_client_with_an_idempotency_key_may_come_again(service: Ready, jobs: Client) -> None:
    seen = {job["id"] for job in jobs.jobs()}
    body = {"model": "echo", "messages": MESSAGES, "max_tokens": 300}
    headers = {**authorized(service), "Idempotency-Key": "come again"}
    url = f"{service.access.url}/v1/chat/completions"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, headers=headers, timeout=0.3, trust_env=False)
    answer = httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)
    (job_id,) = {job["id"] for job in jobs.jobs()} - seen
    assert job_id_of(answer.json()["id"]) == job_id
    assert answer.json()["usage"]["completion_tokens"] == 300
    other = httpx.post(url, json={**body, "max_tokens": 1}, headers=headers, timeout=60, trust_env=False)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


def test_a_stream_whose_job_is_cancelled_elsewhere_ends_with_an_error(service: Ready, jobs: Client) -> None:
    seen = {job["id"] for job in jobs.jobs()}
    body = {"model": "echo", "messages": MESSAGES, "max_tokens": 2000, "stream": True}
    url = f"{service.access.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=authorized(service), timeout=30, trust_env=False) as answer:
        (job_id,) = {job["id"] for job in jobs.jobs()} - seen
        jobs.cancel(job_id)
        last = [line for line in answer.iter_lines() if line.startswith("data: ")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "job_cancelled"


def test_a_native_job_is_waited_for_where_that_is_preferred(service: Ready) -> None:
    url = f"{service.access.url}/v1/jobs"
    with httpx.Client(trust_env=False, headers=authorized(service), timeout=60) as http:
        ended = http.post(url, json={"prompt": "x", "max_tokens": 3}, headers={"Prefer": "wait=30"})
        early = http.post(url, json={"prompt": "x", "max_tokens": 2000}, headers={"Prefer": "respond-async, wait=0"})
    assert (ended.status_code, ended.json()["status"]) == (200, "succeeded")
    assert ended.headers["Preference-Applied"] == "wait=30"
    assert (early.status_code, early.json()["status"] in ("queued", "running")) == (202, True)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ("chat/completions", {"messages": MESSAGES, "audio": {}}, "audio"),
        ("chat/completions", {"messages": MESSAGES, "n": 9}, "n"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("completions", {"prompt": "x", "logprobs": 6}, "logprobs"),
    ],
)
def test_what_is_not_there_is_refused_by_name(service: Ready, path: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{service.access.url}/v1/{path}", json=body, headers=authorized(service), trust_env=False)
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == (param or "messages[0].content[0].type")


def authorized(service: Ready) -> dict[str, str]:
    return {"Authorization": f"Bearer {service.access.paid_key}"}


def has_status(jobs: Client, job_id: str, status: str) -> Callable[[], bool]:
    return lambda: jobs.get(job_id)["status"] == status


def sse(service: Ready, path: str, body: dict[str, Any]) -> list[str]:
    """The data of each event of a stream."""
    url = f"{service.access.url}{path}"
    answer = httpx.post(url, json=body, headers=authorized(service), timeout=60, trust_env=False)
    return [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
