"""/v1/files: uploads go straight to the disk, whole or not at all, and stay their tenant's own."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from werkzeug.test import TestResponse

from app.api import create_app
from app.api.services import services_of
from app.settings import Settings

CUT_OFF = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\ncut of'
NAMELESS = CUT_OFF.replace(b' name="file";', b"") + b"\r\n--b--\r\n"
FOR_AN_HOUR = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
SECONDS = "expires_after[seconds]"
UNKNOWN = f"file_{'0' * 32}"


def upload(call: Any, content: bytes = b"{}\n", *, filename: str = "rows.jsonl", **fields: Any) -> TestResponse:
    return send(call, {"purpose": "batch", "file": (filename, content)} | fields)


def send(call: Any, fields: dict[str, Any]) -> TestResponse:
    """Post a form of text fields and of files (name, content). The test client would spool a large one to a file."""
    parts: list[tuple[str, Any]] = []
    for name, value in fields.items():
        parts += [(name, each if isinstance(each, tuple) else (None, each)) for each in _listed(value)]
    form = httpx.Request("POST", "http://here/", files=parts)
    return call("POST", "/v1/files", data=form.read(), content_type=form.headers["Content-Type"])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def directory(settings: Settings) -> Path:
    return settings.home / "files"


def drafts(settings: Settings) -> list[Path]:
    return [path for path in directory(settings).iterdir() if path.name.startswith(".")]


def test_an_upload_is_answered_with_openais_file(call: Any, settings: Settings) -> None:
    answer = upload(call, b"one\ntwo\n")
    assert answer.status_code == 200
    file = answer.json
    assert file is not None
    assert set(file) == {"id", "object", "bytes", "created_at", "expires_at", "filename", "purpose", "status"}
    assert (file["object"], file["bytes"], file["status"]) == ("file", 8, "processed")
    assert (file["filename"], file["purpose"]) == ("rows.jsonl", "batch")
    assert isinstance(file["created_at"], int)
    assert file["expires_at"] is None
    assert call("GET", f"/v1/files/{file['id']}").json == file
    assert (directory(settings) / file["id"]).read_bytes() == b"one\ntwo\n"
    assert drafts(settings) == []


def test_the_content_comes_back_byte_for_byte_and_in_ranges(call: Any) -> None:
    content = bytes(range(256)) * 1_000 + b"x" * 3_000_000 + b"\r\n" * 500_000
    file = upload(call, content).json
    assert file is not None
    path = f"/v1/files/{file['id']}/content"
    answer = call("GET", path, buffered=True)
    assert answer.data == content
    assert answer.headers["Content-Length"] == str(len(content))
    assert answer.mimetype == "application/octet-stream"
    part = call("GET", path, headers={"Range": "bytes=255-256"}, buffered=True)
    assert (part.status_code, part.data) == (206, b"\xff\x00")


def test_lists_are_paged_and_filtered(call: Any) -> None:
    for _ in range(3):
        upload(call)
    ids = [file["id"] for file in call("GET", "/v1/files").json["data"]]
    assert len(ids) == 3
    assert ids == sorted(ids, reverse=True)
    first = call("GET", "/v1/files?limit=2").json
    assert (first["has_more"], first["first_id"], first["last_id"]) == (True, ids[0], ids[1])
    rest = call("GET", f"/v1/files?limit=2&after={ids[1]}").json
    assert ([file["id"] for file in rest["data"]], rest["has_more"]) == ([ids[2]], False)
    assert [file["id"] for file in call("GET", "/v1/files?order=asc").json["data"]] == ids[::-1]
    assert call("GET", "/v1/files?purpose=batch_output").json == {
        "object": "list",
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }


def test_a_deleted_file_is_gone(call: Any, settings: Settings) -> None:
    file = upload(call).json
    assert file is not None
    answer = call("DELETE", f"/v1/files/{file['id']}", headers={"Content-Type": "application/json"})
    assert answer.json == {"id": file["id"], "object": "file", "deleted": True}
    assert not (directory(settings) / file["id"]).exists()
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert call(method, f"/v1/files/{file['id']}{path}").status_code == 404


def test_a_file_may_be_kept_for_a_while(call: Any) -> None:
    file = upload(call, **FOR_AN_HOUR).json
    assert file is not None
    assert file["expires_at"] == file["created_at"] + 3600


@pytest.mark.parametrize(
    ("data", "status", "param"),
    [
        ({"purpose": "batch"}, 422, "file"),
        ({"purpose": "batch", "file": "not a file part"}, 422, "file"),
        ({"purpose": "batch_output", "file": ("a", b"x")}, 422, "purpose"),
        ({"purpose": "fine-tune", "file": ("a", b"x")}, 422, "purpose"),
        ({"file": ("a", b"x")}, 422, "purpose"),
        ({"purpose": "batch", "file": ("a", b"x"), **FOR_AN_HOUR, "expires_after[seconds]": "1h"}, 422, SECONDS),
        ({"purpose": "batch", "file": ("a", b"x"), **FOR_AN_HOUR, "expires_after[seconds]": "1"}, 422, SECONDS),
        ({"purpose": "batch", "file": ("a", b"x"), "expires_after[seconds]": "3600"}, 422, "expires_after[anchor]"),
        ({"purpose": "batch", "file": ("a", b"x"), "expires": "3600"}, 422, "expires"),
        ({"purpose": "batch", "file": [("a", b"x"), ("b", b"y")]}, 422, "file"),
        ({"purpose": "x" * 2_000_000, "file": ("a", b"x")}, 413, None),
    ],
)
def test_a_wrong_form_is_refused_by_its_field(
    call: Any, settings: Settings, data: dict[str, Any], status: int, param: str | None
) -> None:
    answer = send(call, data)
    assert answer.status_code == status
    assert answer.json is not None
    assert answer.json["error"]["param"] == param
    assert drafts(settings) == []


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"{}", "application/json"),
        (b"", ""),
        (b"x", "multipart/form-data"),  # no boundary
        (b"x", "multipart/form-data; boundary=b"),
        (CUT_OFF, "multipart/form-data; boundary=b"),
        (NAMELESS, "multipart/form-data; boundary=b"),
        (NAMELESS.replace(b' filename="a"', b""), "multipart/form-data; boundary=b"),
    ],
)
def test_what_is_no_form_is_malformed(call: Any, settings: Settings, body: bytes, content_type: str) -> None:
    upload(call)
    answer = call("POST", "/v1/files", data=body, content_type=content_type)
    assert answer.status_code == 400
    assert answer.json["error"]["code"] == "malformed_body"
    assert drafts(settings) == []


def test_a_file_over_the_limit_is_refused_and_leaves_nothing(call: Any, settings: Settings) -> None:
    app = create_app(settings.model_copy(update={"max_file_bytes": 1_000}))
    limited = type(call)(app, call.key)
    try:
        assert upload(limited, b"x" * 1_000).status_code == 200
        for size in (1_001, 2_000_000):  # found while it comes, and by the length that it names
            answer = upload(limited, b"x" * size)
            assert answer.status_code == 413
            assert answer.json is not None
            assert answer.json["error"]["code"] == "payload_too_large"
    finally:
        services_of(app).close()
    assert drafts(settings) == []


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=10001", "limit=x", "order=up", "after=x", "after=batch_1", "purpose=%00"]
)
def test_a_wrong_query_is_refused(call: Any, query: str) -> None:
    assert call("GET", f"/v1/files?{query}").status_code == 422


def test_somebody_elses_file_looks_like_none(call: Any, call_as: Any, new_tenant: Callable[..., Any]) -> None:
    file, other = upload(call).json, call_as(new_tenant())
    assert file is not None
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        theirs, none = (other(method, f"/v1/files/{file_id}{path}") for file_id in (file["id"], UNKNOWN))
        assert (theirs.status_code, none.status_code) == (404, 404)
        assert theirs.text.replace(file["id"], UNKNOWN) == none.text
    assert other("GET", "/v1/files").json["data"] == []
    assert call("GET", f"/v1/files/{file['id']}/content", buffered=True).data == b"{}\n"


def test_without_a_key_nothing_is_read(app: Any, settings: Settings) -> None:
    answer = app.test_client().post("/v1/files", data={"purpose": "batch", "file": (io.BytesIO(b"x"), "a")})
    assert answer.status_code == 401
