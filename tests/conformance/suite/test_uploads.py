"""Files that come in parts."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import openai
import pytest

PARTS = [b"caf\xc3", b"\xa9\n", os.urandom(100_000)]
WHOLE = b"".join(PARTS)


def begin(client: Any, size: int = len(WHOLE)) -> Any:
    return client.uploads.create(bytes=size, filename="a.jsonl", mime_type="application/jsonl", purpose="batch")


def add(client: Any, upload_id: str, part: bytes) -> str:
    added = client.uploads.parts.create(upload_id, data=part)
    assert (added.object, added.upload_id) == ("upload.part", upload_id)
    part_id: str = added.id
    return part_id


def test_parts_are_joined_in_the_order_that_is_told(client: Any) -> None:
    upload = begin(client)
    assert (upload.object, upload.status, upload.bytes) == ("upload", "pending", len(WHOLE))
    assert upload.expires_at > upload.created_at
    last_first = [add(client, upload.id, part) for part in PARTS[::-1]]
    md5 = hashlib.md5(WHOLE).hexdigest()
    done = client.uploads.complete(upload.id, part_ids=last_first[::-1], md5=md5)
    assert (done.status, done.file.bytes, done.file.filename) == ("completed", len(WHOLE), "a.jsonl")
    assert client.files.content(done.file.id).read() == WHOLE
    assert client.uploads.complete(upload.id, part_ids=last_first[::-1]) == done


def test_a_file_is_cut_by_the_client(client: Any, tmp_path: Path) -> None:
    path = tmp_path / "whole.jsonl"
    path.write_bytes(WHOLE)
    done = client.uploads.upload_file_chunked(
        file=path, mime_type="application/jsonl", purpose="batch", part_size=40_000
    )
    assert client.files.content(done.file.id).read() == WHOLE


def test_a_cancelled_upload_takes_no_parts(client: Any) -> None:
    upload = begin(client)
    add(client, upload.id, PARTS[0])
    assert client.uploads.cancel(upload.id).status == "cancelled"
    for again in (
        lambda: add(client, upload.id, PARTS[1]),
        lambda: client.uploads.complete(upload.id, part_ids=["part_" + 32 * "0"]),
    ):
        with pytest.raises(openai.ConflictError):
            again()


@pytest.mark.parametrize(("size", "told"), [(len(WHOLE) + 1, {}), (len(WHOLE), {"md5": 32 * "0"})])
def test_what_is_not_the_promised_file_is_refused(client: Any, size: int, told: dict[str, str]) -> None:
    upload = begin(client, size)
    parts = [add(client, upload.id, part) for part in PARTS]
    with pytest.raises(openai.UnprocessableEntityError):
        client.uploads.complete(upload.id, part_ids=parts, **told)


def test_an_unknown_upload_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        client.uploads.cancel("upload_" + 32 * "0")
