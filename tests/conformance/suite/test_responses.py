"""Responses: waited for, in the background, streamed, and resumed behind any of their events."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from given import WaitFor
from pydantic import BaseModel

ASKED: dict[str, Any] = {"model": "echo", "input": "Why? ä\u2028\U0001f600", "max_output_tokens": 12}
WHOLE: dict[str, Any] = {"extra_body": {"structured": {"choice": ["the sky is blue", "the sky is grey"]}}}
"""Makes a response complete: otherwise it is cut off at max_output_tokens."""
LONG: dict[str, Any] = {**ASKED, "max_output_tokens": 4000}
UNKNOWN = f"resp_{'0' * 32}"
ENDED = ("completed", "incomplete", "failed", "cancelled")


class Answer(BaseModel):
    """What a structured answer is to be."""

    is_blue: bool


def test_a_response_has_all_that_the_client_reads(client: Any) -> None:
    done = client.responses.create(
        **{**ASKED, "max_output_tokens": 64}, **WHOLE, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
    )
    assert (done.object, done.status, done.model, done.background) == ("response", "completed", "echo", False)
    assert done.output_text in ("the sky is blue", "the sky is grey")
    (message,) = done.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (done.instructions, done.metadata, done.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    assert (done.error, done.incomplete_details, done.service_tier) == (None, None, "default")
    assert client.responses.retrieve(done.id) == done


def test_a_text_that_was_cut_off_is_incomplete(client: Any) -> None:
    done = client.responses.create(**ASKED)
    assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert len(done.output_text) == done.usage.output_tokens == 12


def test_an_earlier_output_may_be_sent_back(client: Any) -> None:
    first = client.responses.create(**ASKED)
    talk = [{"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}, *first.output]
    assert client.responses.create(**ASKED | {"input": [*talk, {"role": "user", "content": "And?"}]}).output_text


def test_a_response_in_the_background_is_polled(client: Any, wait_for: WaitFor) -> None:
    made = client.responses.create(**ASKED, background=True)
    assert made.background is True and made.usage is None
    assert made.status in ("queued", "in_progress")
    done = wait_for(lambda: client.responses.retrieve(made.id), lambda now: now.status in ENDED)
    assert (done.status, len(done.output_text)) == ("incomplete", 12)


def test_a_window_is_taken(client: Any) -> None:
    window = {"background_options": {"completion_window": "2h"}}
    made = client.responses.create(**ASKED, background=True, extra_body=window)
    assert client.responses.cancel(made.id).id == made.id


def test_a_stream_is_resumed_behind_each_of_its_events(client: Any) -> None:
    live = list(client.responses.create(**ASKED, background=True, stream=True))
    numbers = [event.sequence_number for event in live]
    assert numbers == list(range(len(live)))
    kinds = [event.type.removeprefix("response.") for event in live]
    assert kinds[0] == "created" and kinds[-1] == "incomplete"
    assert kinds.index("in_progress") < kinds.index("output_item.added") < kinds.index("output_text.delta")
    assert kinds[-4:-1] == ["output_text.done", "content_part.done", "output_item.done"]
    end = live[-1].response
    deltas = "".join(event.delta for event in live if event.type == "response.output_text.delta")
    assert deltas == end.output_text
    assert client.responses.retrieve(end.id) == end
    assert list(client.responses.retrieve(end.id, stream=True)) == live
    for number in numbers:
        assert list(client.responses.retrieve(end.id, stream=True, starting_after=number)) == live[number + 1 :]


def test_the_clients_own_accumulator_takes_the_stream(client: Any) -> None:
    with client.responses.stream(**{**ASKED, "max_output_tokens": 64}, **WHOLE) as stream:
        events = list(stream)
        done = stream.get_final_response()
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert deltas[-1].snapshot == done.output_text
    assert client.responses.retrieve(done.id).output_text == done.output_text
    assert events[-1].type == "response.completed"


def test_the_clients_own_accumulator_resumes(client: Any) -> None:
    made = client.responses.create(**ASKED, background=True)
    with client.responses.stream(response_id=made.id) as stream:
        whole = [event.sequence_number for event in stream]
    with client.responses.stream(response_id=made.id, starting_after=2) as stream:
        assert [event.sequence_number for event in stream] == whole[3:]


def test_the_client_parses_what_its_model_describes(client: Any) -> None:
    done = client.responses.parse(**{**ASKED, "max_output_tokens": 64}, text_format=Answer)
    assert isinstance(done.output_parsed, Answer)
    with client.responses.stream(**{**ASKED, "max_output_tokens": 64}, text_format=Answer) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Answer)


def test_a_cancelled_response_keeps_its_text(client: Any, wait_for: WaitFor) -> None:
    made = client.responses.create(**LONG, background=True)
    wait_for(lambda: client.responses.retrieve(made.id), lambda now: now.output_text)
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled" and 0 < len(cancelled.output_text) < 4000
    assert client.responses.cancel(made.id) == cancelled
    last = list(client.responses.retrieve(made.id, stream=True))[-1]
    assert (last.type, last.response) == ("response.incomplete", cancelled)


def test_a_response_that_has_ended_cannot_be_cancelled(client: Any) -> None:
    done = client.responses.create(**ASKED)
    with pytest.raises(openai.ConflictError):
        client.responses.cancel(done.id)


def test_a_deleted_response_is_gone(client: Any) -> None:
    for asked in ({**ASKED}, {**LONG, "background": True}):
        made = client.responses.create(**asked)
        assert client.responses.delete(made.id) is None
        _all_refuse(client, made.id)


def test_an_unknown_response_is_not_found(client: Any) -> None:
    _all_refuse(client, UNKNOWN)
    _all_refuse(client, "resp_x")


def _all_refuse(client: Any, response_id: str) -> None:
    for again in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            again(response_id)
    with pytest.raises(openai.NotFoundError):
        list(client.responses.retrieve(response_id, stream=True))


def test_a_response_that_expires_has_failed(client: Any, wait_for: WaitFor) -> None:
    made = client.responses.create(**LONG, background=True, extra_body={"deadline": 0.01})
    done = wait_for(lambda: client.responses.retrieve(made.id), lambda now: now.status in ENDED)
    assert (done.status, done.error.code) == ("failed", "server_error")
    last = list(client.responses.retrieve(made.id, stream=True))[-1]
    assert (last.type, last.response) == ("response.failed", done)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "web_search"}]),
        ("previous_response_id", UNKNOWN),
        ("store", False),
        ("input", []),
        ("max_output_tokens", 10**9),
    ],
)
def test_what_is_not_there_is_refused_by_name(client: Any, field: str, value: Any) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.responses.create(**ASKED | {field: value})
    assert (refused.value.param, refused.value.code) == (field, "invalid_request")
