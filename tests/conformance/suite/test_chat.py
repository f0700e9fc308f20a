"""Chat completions, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from given import WaitFor
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "Why? ä\u2028\U0001f600"}]
ASKED: dict[str, Any] = {"model": "echo", "messages": MESSAGES, "max_completion_tokens": 8, "seed": 5}


class Answer(BaseModel):
    """What a structured answer is to be."""

    is_blue: bool
    shade: int


ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"is_blue": {"type": "boolean"}, "shade": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["is_blue", "shade"],
    "additionalProperties": False,
}


def test_an_answer_has_all_that_the_client_reads(client: Any) -> None:
    done = client.chat.completions.create(**ASKED, n=2, metadata={"a": "b"}, user="me", stop=None)
    assert (done.object, done.model, done.service_tier) == ("chat.completion", "echo", "default")
    assert [choice.index for choice in done.choices] == [0, 1]
    for choice in done.choices:
        assert (choice.finish_reason, choice.message.role, len(choice.message.content)) == ("length", "assistant", 8)
        assert choice.logprobs is None and choice.message.refusal is None and choice.message.tool_calls is None
    assert (done.usage.completion_tokens, done.usage.total_tokens) == (16, done.usage.prompt_tokens + 16)
    assert done._request_id
    again = client.chat.completions.create(**ASKED, n=2)
    assert again.choices == done.choices and again.id != done.id


def test_all_kinds_of_messages_are_taken(client: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    roles = ("system", "developer", "user", "assistant")
    messages = [{"role": role, "content": content} for role in roles for content in ("x", parts)]
    assert client.chat.completions.create(**ASKED | {"messages": messages}).choices[0].message.content


@pytest.mark.parametrize("with_usage", [True, False])
def test_chunks_join_to_the_whole_answer(client: Any, with_usage: bool) -> None:
    whole = client.chat.completions.create(**ASKED, n=2)
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    chunks = list(client.chat.completions.create(**ASKED, n=2, stream=True, **options))
    if with_usage:
        last = chunks.pop()
        assert (last.choices, last.usage) == ([], whole.usage)
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert {(chunk.object, chunk.model, chunk.service_tier) for chunk in chunks} == {
        ("chat.completion.chunk", "echo", "default")
    }
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    for choice in whole.choices:
        mine = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content
        assert [each.finish_reason for each in mine[-2:]] == [None, "length"]


def test_the_clients_own_accumulator_takes_the_stream(client: Any) -> None:
    whole = client.chat.completions.create(**ASKED)
    with client.chat.completions.stream(**ASKED, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        with pytest.raises(openai.LengthFinishReasonError):  # as for any text that was cut off
            stream.get_final_completion()
        snapshot = stream.current_completion_snapshot
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert snapshot.choices[0].message.content == whole.choices[0].message.content
    assert snapshot.usage == whole.usage


def test_a_stream_that_is_left_ends_its_job(client: Any, wait_for: WaitFor) -> None:
    stream = client.chat.completions.create(**ASKED | {"max_completion_tokens": 4000}, stream=True)
    first = next(iter(stream))
    stream.close()
    path = f"/jobs/job_{first.id.removeprefix('chatcmpl-')}"
    job = wait_for(lambda: client.get(path, cast_to=object), lambda job: job["finished_at"])
    assert job["status"] == "cancelled"


def test_logprobs_are_told_for_each_token(client: Any) -> None:
    asked = {**ASKED, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**asked).choices[0]
    told = whole.logprobs.content
    assert "".join(each.token for each in told) == whole.message.content
    assert all(each.bytes == list(each.token.encode()) and each.logprob <= 0 for each in told)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    streamed = [each.logprobs for chunk in chunks for each in chunk.choices if each.logprobs is not None]
    assert [token for logprobs in streamed for token in logprobs.content] == told


def test_a_stop_string_ends_the_text_and_is_not_shown(client: Any) -> None:
    asked = {**ASKED, "max_completion_tokens": 60}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    stop = whole[20:22]
    chosen = client.chat.completions.create(**asked, stop=[stop, "\u2028"]).choices[0]
    assert (chosen.finish_reason, chosen.message.content) == ("stop", whole[: whole.index(stop)])
    chunks = list(client.chat.completions.create(**asked, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chosen.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_schema_is_kept_to(client: Any) -> None:
    schema = {"name": "answer", "strict": True, "schema": ANSWER}
    asked = {**ASKED, "max_completion_tokens": 64, "response_format": {"type": "json_schema", "json_schema": schema}}
    done = client.chat.completions.create(**asked)
    assert done.choices[0].finish_reason == "stop"
    Answer.model_validate(json.loads(done.choices[0].message.content))
    chunks = list(client.chat.completions.create(**asked, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == done.choices[0].message.content


def test_the_client_parses_what_its_model_describes(client: Any) -> None:
    asked = {**ASKED, "max_completion_tokens": 64, "response_format": Answer}
    parsed = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Answer)
    with client.chat.completions.stream(**asked) as stream:
        last = [event for event in stream if event.type == "content.done"]
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    assert [event.parsed for event in last] == [parsed]


@pytest.mark.parametrize(
    ("asked", "shown"), [("auto", "default"), ("default", "default"), ("flex", "flex"), ("priority", "priority")]
)
def test_the_tier_is_told(client: Any, asked: str, shown: str) -> None:
    done = client.chat.completions.create(**ASKED, service_tier=asked)
    chunks = list(client.chat.completions.create(**ASKED, service_tier=asked, stream=True))
    assert {done.service_tier} | {chunk.service_tier for chunk in chunks} == {shown}


def test_fields_of_ours_come_in_the_extra_body(client: Any) -> None:
    extra = {"structured": {"choice": ["blue", "grey"]}, "top_k": 5, "min_p": 0.1}
    done = client.chat.completions.create(**ASKED, extra_body=extra)
    assert done.choices[0].message.content in ("blue", "grey")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        ("modalities", ["audio"]),
        ("n", 9),
        ("top_logprobs", 1),
        ("service_tier", "scale"),
        ("max_completion_tokens", 10**9),
    ],
)
def test_what_is_not_there_is_refused_by_name(client: Any, field: str, value: Any) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.chat.completions.create(**ASKED | {field: value})
    assert (refused.value.param, refused.value.code) == (field, "invalid_request")
