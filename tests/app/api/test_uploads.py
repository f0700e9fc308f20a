"""/v1/uploads: parts in any order become one file, whole or not at all, and are gone afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from werkzeug.test import TestResponse

from app.db import Database
from app.settings import Settings
from app.shelf import Shelf
from worker.batches import remove_strays

UNKNOWN = f"upload_{'0' * 32}"


def begin(call: Any, size: int, **fields: Any) -> TestResponse:
    body = {"bytes": size, "filename": "rows.jsonl", "mime_type": "application/jsonl", "purpose": "batch", **fields}
    return call("POST", "/v1/uploads", json=body)


def pending(call: Any, size: int, **fields: Any) -> str:
    return str(begin(call, size, **fields).json["id"])


def add(call: Any, upload_id: str, data: bytes) -> TestResponse:
    form = httpx.Request("POST", "http://here/", files={"data": ("blob", data)})
    content_type = form.headers["Content-Type"]
    return call("POST", f"/v1/uploads/{upload_id}/parts", data=form.read(), content_type=content_type)


def complete(call: Any, upload_id: str, part_ids: list[str], **fields: Any) -> TestResponse:
    return call("POST", f"/v1/uploads/{upload_id}/complete", json={"part_ids": part_ids, **fields})


def cancel(call: Any, upload_id: str) -> TestResponse:
    return call("POST", f"/v1/uploads/{upload_id}/cancel", content_type="application/json")


def shelved(settings: Settings) -> set[str]:
    directory = Shelf(settings).directory
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def expire(db: Database, table: str, row_id: str, *, ago: str) -> None:
    with db.transaction() as session:
        session.execute(
            text(f"update {table} set expires_at = now() - cast(:ago as interval) where id = :id"),
            {"ago": ago, "id": row_id},
        )


def test_parts_become_one_file_in_the_order_that_is_asked_for(call: Any, settings: Settings) -> None:
    begun = begin(call, 8).json
    assert begun is not None
    assert (begun["object"], begun["status"], begun["bytes"], begun["file"]) == ("upload", "pending", 8, None)
    assert begun["expires_at"] == begun["created_at"] + 3600
    second, first = (add(call, begun["id"], data).json for data in (b"two\n", b"one\n"))
    assert first is not None and second is not None
    assert (first["object"], first["upload_id"]) == ("upload.part", begun["id"])
    md5 = hashlib.md5(b"one\ntwo\n", usedforsecurity=False).hexdigest()
    done = complete(call, begun["id"], [first["id"], second["id"]], md5=md5).json
    assert done is not None
    assert (done["status"], done["file"]["bytes"], done["file"]["filename"]) == ("completed", 8, "rows.jsonl")
    with closing(call("GET", f"/v1/files/{done['file']['id']}/content")) as content:
        assert content.data == b"one\ntwo\n"
    assert not shelved(settings) & {first["id"], second["id"]}
    assert complete(call, begun["id"], ["whatever"]).json == done, "its answer may have been lost"
    assert cancel(call, begun["id"]).status_code == 409


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"bytes": 0}, 422, "bytes"),
        ({"bytes": 10**12}, 413, "bytes"),
        ({"purpose": "fine-tune"}, 422, "purpose"),
        ({"filename": ""}, 422, "filename"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, 422, "expires_after.seconds"),
        ({"more": 1}, 422, "more"),
    ],
)
def test_an_upload_that_cannot_be_is_refused_by_field(
    call: Any, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = begin(call, 8, **fields)
    assert answer.json is not None
    assert (answer.status_code, answer.json["error"]["param"]) == (status, param)


def test_parts_beyond_what_was_announced_are_refused(call: Any, settings: Settings) -> None:
    upload_id = pending(call, 4)
    before = shelved(settings)
    answer = add(call, upload_id, b"12345")
    assert answer.json is not None
    assert (answer.status_code, answer.json["error"]["param"]) == (422, "data")
    assert shelved(settings) == before


@pytest.mark.parametrize(
    ("chosen", "fields", "param"),
    [
        ("first", {}, "part_ids"),
        ("twice", {}, "part_ids"),
        ("foreign", {}, "part_ids[1]"),
        ("both", {"md5": "0" * 32}, "md5"),
        ("both", {"md5": "five"}, "md5"),
        ("none", {}, "part_ids"),
    ],
)
def test_a_completion_that_does_not_fit_leaves_the_upload_pending(
    call: Any, chosen: str, fields: dict[str, str], param: str
) -> None:
    upload_id = pending(call, 4)
    first, second = (str(add(call, upload_id, data).json["id"]) for data in (b"ab", b"cd"))
    foreign = str(add(call, pending(call, 2), b"cd").json["id"])
    part_ids = {
        "first": [first],
        "twice": [first, first],
        "foreign": [first, foreign],
        "both": [first, second],
        "none": [],
    }[chosen]
    answer = complete(call, upload_id, part_ids, **fields)
    assert answer.json is not None
    assert (answer.status_code, answer.json["error"]["param"]) == (422, param)
    assert complete(call, upload_id, [first, second]).status_code == 200


def test_a_cancelled_upload_takes_nothing_more_and_leaves_nothing(call: Any, settings: Settings) -> None:
    upload_id = pending(call, 4)
    part_id = add(call, upload_id, b"ab").json["id"]
    assert part_id in shelved(settings)
    assert [cancel(call, upload_id).json["status"] for _ in range(2)] == ["cancelled", "cancelled"]
    assert part_id not in shelved(settings)
    assert add(call, upload_id, b"cd").status_code == 409
    assert complete(call, upload_id, [part_id]).status_code == 409


def test_an_upload_expires_with_its_parts(call: Any, settings: Settings, db: Database) -> None:
    upload_id = pending(call, 4)
    part_id = add(call, upload_id, b"abcd").json["id"]
    remove_strays(db, Shelf(settings))
    assert part_id in shelved(settings)
    expire(db, "uploads", upload_id, ago="2 hours")
    assert complete(call, upload_id, [part_id]).status_code == 409
    remove_strays(db, Shelf(settings))
    assert part_id not in shelved(settings)
    assert cancel(call, upload_id).status_code == 409
    expire(db, "uploads", upload_id, ago="2 days")
    remove_strays(db, Shelf(settings))
    assert cancel(call, upload_id).status_code == 404


def test_a_file_expires_but_not_under_a_batch(call: Any, settings: Settings, db: Database) -> None:
    kept = {"anchor": "created_at", "seconds": 3600}
    ids = []
    for _ in range(2):
        upload_id = pending(call, 3, expires_after=kept)
        part_id = add(call, upload_id, b"{}\n").json["id"]
        file = complete(call, upload_id, [part_id]).json["file"]
        assert file["expires_at"] == file["created_at"] + 3600
        ids.append(file["id"])
    batch = {"input_file_id": ids[0], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert call("POST", "/v1/batches", json=batch).status_code == 200
    for file_id in ids:
        expire(db, "files", file_id, ago="2 hours")
        assert call("GET", f"/v1/files/{file_id}").status_code == 404
        assert file_id not in {file["id"] for file in call("GET", "/v1/files").json["data"]}
    assert call("POST", "/v1/batches", json={**batch, "input_file_id": ids[1]}).status_code == 404
    remove_strays(db, Shelf(settings))
    assert shelved(settings) & set(ids) == {ids[0]}


def test_somebody_elses_upload_looks_like_none(
    call: Any, call_as: Callable[[Any], Any], new_tenant: Callable[[], Any]
) -> None:
    upload_id = pending(call, 4)
    stranger = call_as(new_tenant())
    for each in (upload_id, UNKNOWN):
        assert cancel(stranger, each).status_code == 404
        assert complete(stranger, each, ["part"]).status_code == 404
        assert add(stranger, each, b"ab").status_code == 404
