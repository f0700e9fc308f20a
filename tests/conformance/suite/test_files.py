"""Files: bytes in, the same bytes out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import openai
import pytest

ODD = "ä\u2028b\u2029 \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467\x00\r\n\x85".encode()
"""Line separators that are none in JSONL, characters of two to four bytes, one of several."""


def test_the_bytes_come_back_as_they_went(client: Any, tmp_path: Path) -> None:
    for number, content in enumerate((ODD, os.urandom(3_000_000), b"\xef\xbb\xbf\n")):
        path = tmp_path / f"{number} ü.jsonl"
        path.write_bytes(content)
        made = client.files.create(file=path, purpose="batch")
        assert (made.object, made.bytes, made.filename) == ("file", len(content), path.name)
        assert (made.purpose, made.status) == ("batch", "processed")
        assert client.files.content(made.id).read() == content
        assert client.files.retrieve(made.id) == made


def test_content_is_streamed(client: Any) -> None:
    content = os.urandom(200_000)
    made = client.files.create(file=("a.jsonl", content), purpose="batch")
    with client.files.with_streaming_response.content(made.id) as answer:
        assert b"".join(answer.iter_bytes(7_777)) == content


def test_a_file_is_processed_at_once(client: Any) -> None:
    made = client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
    assert client.files.wait_for_processing(made.id, poll_interval=0.1, max_wait_seconds=5) == made


def test_a_deleted_file_is_gone(client: Any) -> None:
    made = client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
    gone = client.files.delete(made.id)
    assert (gone.id, gone.object, gone.deleted) == (made.id, "file", True)
    for again in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            again(made.id)


def test_a_file_may_expire(client: Any) -> None:
    window = {"anchor": "created_at", "seconds": 7200}
    made = client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch", expires_after=window)
    assert made.expires_at == made.created_at + 7200


def test_pages_are_followed_to_the_end(client: Any) -> None:
    made = [client.files.create(file=(f"{number}.jsonl", b"{}\n"), purpose="batch").id for number in range(5)]
    newest = [file.id for file in client.files.list(limit=2)]
    assert [file_id for file_id in newest if file_id in made] == made[::-1]
    oldest = [file.id for file in client.files.list(limit=3, order="asc")]
    assert oldest == newest[::-1]
    assert len(newest) == len(set(newest))
    page = client.files.list(limit=2, after=made[2])
    assert ([file.id for file in page.data], page.has_more) == ([made[1], made[0]], True)
    assert {file.purpose for file in client.files.list(purpose="batch")} == {"batch"}


def test_another_purpose_is_refused(client: Any) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.files.create(file=("a.jsonl", b"{}\n"), purpose="fine-tune")
    assert refused.value.param == "purpose"


def test_a_name_of_any_letters_is_kept(client: Any) -> None:
    name = "ü [1] \u2028 \U0001f600.jsonl"
    assert client.files.create(file=(name, b"{}\n"), purpose="batch").filename == name
