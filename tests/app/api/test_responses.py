"""/v1/responses, as the stock client speaks to it, over a whole running service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from app.client import Client
from app.supervisor import Ready


@pytest.fixture
def client(service: Ready) -> Iterator[openai.OpenAI]:
    """The stock client, which refuses an answer that is not of its types."""
    url = f"{service.access.url}/v1"
    key = service.access.paid_key
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, _strict_response_validation=True) as client:
        yield client


@pytest.fixture
def jobs(service: Ready) -> Iterator[Client]:
    with Client(service.access.url, service.access.paid_key) as jobs:
        yield jobs


def job_id_of(response_id: str) -> str:
    return f"job_{response_id.removeprefix('resp_')}"


def test_a_response_is_waited_for(client: openai.OpenAI, jobs: Client) -> None:
    done = client.responses.create(model="echo", input="Why?", instructions="Be brief.", max_output_tokens=6)
    job = jobs.get(job_id_of(done.id))
    assert done.output_text == job["output"]["choices"][0]["text"]
    assert (done.status, done.instructions) == ("incomplete", "Be brief.")
    assert done.incomplete_details is not None and done.incomplete_details.reason == "max_output_tokens"
    assert done.usage is not None and done.usage.output_tokens == 6
    assert client.responses.retrieve(done.id) == done


def test_a_stream_can_be_resumed_behind_each_of_its_events(client: openai.OpenAI) -> None:
    asked: Any = {"model": "echo", "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]}
    live = list(client.responses.create(**asked, max_output_tokens=12, background=True, stream=True))
    numbers = [event.sequence_number for event in live]
    assert numbers == list(range(len(live)))
    kinds = [event.type.removeprefix("response.") for event in live]
    assert kinds[:3] == ["created", "queued", "in_progress"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    first: Any = live[0]
    last: Any = live[-1]
    deltas = "".join(event.delta for event in live if event.type == "response.output_text.delta")
    assert deltas == last.response.output_text == client.responses.retrieve(first.response.id).output_text
    for number in numbers:
        rest = list(client.responses.retrieve(first.response.id, stream=True, starting_after=number))
        assert rest == live[number + 1 :]


def test_a_cancelled_response_keeps_its_text_and_ends_its_stream(client: openai.OpenAI) -> None:
    made = client.responses.create(model="echo", input="x", max_output_tokens=2000, background=True)
    assert made.status in ("queued", "in_progress")
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    last: Any = list(client.responses.retrieve(made.id, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert last.response.output_text == cancelled.output_text
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_job_that_was_not_asked_for_as_a_response_is_none(client: openai.OpenAI, jobs: Client) -> None:
    job_id = jobs.submit("x", max_tokens=1)["id"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(job_id.replace("job_", "resp_"))
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel(job_id.replace("job_", "resp_"))
    assert list(jobs.events(job_id))[-1].kind == "succeeded"


def test_a_window_is_a_deadline(client: openai.OpenAI) -> None:
    window: Any = {"background_options": {"completion_window": "2h"}}
    made = client.responses.create(model="echo", input="x", max_output_tokens=1, background=True, extra_body=window)
    assert made.background is True


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"n": 2}, "n"),
        ({"store": False}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"max_output_tokens": 10**9}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background_options": {"completion_window": "1h"}}, "background_options.completion_window"),
    ],
)
def test_what_cannot_be_is_refused_by_the_clients_own_names(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.post("/responses", cast_to=object, body={"model": "echo", "input": "x", **fields})
    assert refused.value.param == param
