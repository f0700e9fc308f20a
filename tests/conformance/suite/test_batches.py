"""Batches, from a file of requests to the files of their answers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from given import GIVEN, WaitFor
from openai.types import Completion
from openai.types.chat import ChatCompletion

MESSAGES = [{"role": "user", "content": "Why? ä\u2028\U0001f600"}]
CHAT = "/v1/chat/completions"


def row(custom_id: str, *, url: str = CHAT, **fields: Any) -> bytes:
    """A line of an input file; its text is not escaped."""
    asked = {"prompt": "x"} if url == "/v1/completions" else {"messages": MESSAGES}
    body = {"model": "echo", **asked, "max_tokens": 4, **fields}
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def begin(client: Any, *rows: bytes, endpoint: str = CHAT, **fields: Any) -> Any:
    file = client.files.create(file=("in.jsonl", b"".join(rows)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client: Any, batch_id: str, wait_for: WaitFor) -> Any:
    return wait_for(
        lambda: client.batches.retrieve(batch_id),
        lambda batch: batch.status in ("completed", "failed", "expired", "cancelled"),
    )


def lines_of(client: Any, file_id: str | None) -> dict[str | None, Any]:
    """A file's lines by custom_id, each of which comes once."""
    lines = [] if file_id is None else list(map(json.loads, client.files.content(file_id).content.splitlines()))
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


GOOD = ["a \u2028\U0001f600", "b"]


@pytest.fixture(scope="module")
def begun(client: Any) -> dict[str, Any]:
    """Batches that run beside each other: one alone takes its second, most of which is waiting."""
    texts = "/v1/completions"
    rows = [row(GOOD[0]), row("refused", max_tokens=10**9), row(GOOD[1], n=2, seed=3), b"no JSON\n"]
    window = {"anchor": "created_at", "seconds": 3600}
    return {
        "whole": begin(client, *rows, metadata={"a": "b"}, output_expires_after=window),
        "texts": begin(client, row("a", url=texts, logprobs=1), endpoint=texts),
        "refused": begin(client, row("a", tools=[1])),
        "empty": begin(client, b"\n"),
        "long": begin(client, row("short"), row("long", max_tokens=7000), row("other", max_tokens=7000)),
    }


def test_a_batch_lives_from_its_file_to_its_answers(client: Any, begun: dict[str, Any], wait_for: WaitFor) -> None:
    made = begun["whole"]
    assert (made.object, made.status, made.endpoint) == ("batch", "validating", CHAT)
    assert (made.output_file_id, made.error_file_id, made.metadata) == (None, None, {"a": "b"})
    assert made.expires_at == made.created_at + 86_400

    done = ended(client, made.id, wait_for)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 4, 2, 2)
    assert made.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.to_dict()["usage"]["output_tokens"] == 4 + 8, "the type of client 1.x has no usage"
    answers, problems = lines_of(client, done.output_file_id), lines_of(client, done.error_file_id)
    assert list(answers) == GOOD
    for answer in answers.values():
        assert (answer["response"]["status_code"], answer["error"]) == (200, None)
        completion = ChatCompletion.model_validate(answer["response"]["body"])
        assert completion.service_tier == "flex"
    assert len(answers["b"]["response"]["body"]["choices"]) == 2
    refused = problems["refused"]["response"]
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "body.max_tokens")
    assert set(problems) == {"refused", None}
    output = client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.expires_at) == ("batch_output", output.created_at + 3600)

    with pytest.raises(openai.ConflictError):
        client.batches.cancel(done.id)
    for file_id in (done.input_file_id, done.output_file_id, done.error_file_id):
        assert client.files.delete(file_id).deleted


def test_texts_are_completed_in_batches_too(client: Any, begun: dict[str, Any], wait_for: WaitFor) -> None:
    done = ended(client, begun["texts"].id, wait_for)
    assert (done.status, done.error_file_id) == ("completed", None)
    (answer,) = lines_of(client, done.output_file_id).values()
    assert len(Completion.model_validate(answer["response"]["body"]).choices[0].text) == 4


def test_without_a_good_row_there_is_no_output_file(client: Any, begun: dict[str, Any], wait_for: WaitFor) -> None:
    done = ended(client, begun["refused"].id, wait_for)
    assert (done.status, done.output_file_id, list(lines_of(client, done.error_file_id))) == ("completed", None, ["a"])


def test_a_file_that_cannot_be_used_fails_its_batch(client: Any, begun: dict[str, Any], wait_for: WaitFor) -> None:
    done = ended(client, begun["empty"].id, wait_for)
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert done.failed_at >= done.created_at
    (problem,) = done.errors.data
    assert (done.errors.object, problem.param, problem.line) == ("list", "input_file_id", None)
    assert problem.code and problem.message


def test_a_cancelled_batch_keeps_what_it_has(client: Any, begun: dict[str, Any], wait_for: WaitFor) -> None:
    made = begun["long"]
    wait_for(lambda: client.batches.retrieve(made.id), lambda batch: batch.request_counts.completed == 1)
    with pytest.raises(openai.ConflictError):
        client.files.delete(made.input_file_id)
    cancelled = client.batches.cancel(made.id)
    assert cancelled.status == "cancelling" and cancelled.cancelling_at
    done = ended(client, made.id, wait_for)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("cancelled", 3, 1, 2)
    assert done.cancelled_at >= done.cancelling_at
    assert list(lines_of(client, done.output_file_id)) == ["short"]
    problems = lines_of(client, done.error_file_id)
    assert sorted(problems) == ["long", "other"]
    assert {(line["response"], line["error"]["code"]) for line in problems.values()} == {(None, "batch_cancelled")}
    assert client.batches.cancel(made.id) == done


def test_an_expired_batch_keeps_what_it_has(client: Any, wait_for: WaitFor) -> None:
    done = ended(client, GIVEN.expired_batch, wait_for)
    assert done.status == "expired" and done.expired_at >= done.expires_at
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 2)
    assert list(lines_of(client, done.output_file_id)) == ["short"]
    problems = lines_of(client, done.error_file_id)
    assert {(line["response"], line["error"]["code"]) for line in problems.values()} == {(None, "batch_expired")}


def test_pages_are_followed_to_the_end(client: Any) -> None:
    made = [begin(client, row(str(number))).id for number in range(4)]
    newest = [batch.id for batch in client.batches.list(limit=3)]
    assert newest[:4] == made[::-1]
    assert len(newest) == len(set(newest))
    assert newest[-1] == GIVEN.expired_batch, "the oldest of all"
    page = client.batches.list(limit=2, after=made[2])
    assert [batch.id for batch in page.data] == [made[1], made[0]]
    for batch_id in made:
        assert client.batches.cancel(batch_id).id == batch_id


@pytest.mark.parametrize(
    ("field", "value"), [("endpoint", "/v1/embeddings"), ("completion_window", "soon"), ("metadata", {"a": 600 * "b"})]
)
def test_what_is_not_there_is_refused_by_name(client: Any, field: str, value: Any) -> None:
    file = client.files.create(file=("in.jsonl", row("a")), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", field: value}
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.batches.create(**asked)
    assert refused.value.param is not None and refused.value.param.startswith(field)


def test_what_is_unknown_is_not_found(client: Any) -> None:
    for again in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            again(f"batch_{'0' * 32}")
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=f"file_{'0' * 32}", endpoint=CHAT, completion_window="24h")
