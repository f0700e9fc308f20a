"""Files: whole or not there, and nobody else's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app import batches, files
from app.db import Database
from app.errors import Conflict, NotFound, PayloadTooLarge, Unavailable
from app.settings import Settings
from app.shelf import Shelf
from app.tables import File


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(Settings(home=tmp_path))


def put(db: Database, shelf: Shelf, tenant_id: str, data: bytes = b"x\n", **names: str) -> File:
    with db.transaction() as session, shelf.draft() as draft:
        draft.write(data)
        return files.add(session, tenant_id, draft, **{"filename": "in.jsonl", "purpose": "batch"} | names)


def entries(shelf: Shelf) -> list[str]:
    return sorted(path.name for path in shelf.directory.iterdir())


def test_a_kept_file_is_read_back(db: Database, shelf: Shelf, owner: Any) -> None:
    file = put(db, shelf, owner.tenant_id, b"one\ntwo\n")
    with db.transaction() as session:
        found = files.find(session, owner.tenant_id, file.id)
    assert (found.bytes, found.filename, found.purpose) == (8, "in.jsonl", "batch")
    with shelf.open(file.id) as stream:
        assert stream.read() == b"one\ntwo\n"


def test_a_draft_that_is_not_kept_leaves_nothing(shelf: Shelf) -> None:
    with pytest.raises(RuntimeError), shelf.draft() as draft:
        draft.write(b"half")
        raise RuntimeError
    assert entries(shelf) == []


def test_a_draft_is_invisible_until_it_is_kept_and_replaces_then(shelf: Shelf) -> None:
    path = shelf.path("file_1")
    for content, before in ((b"first", None), (b"second", b"first")):
        with shelf.draft("file_1") as draft:
            draft.write(content)
            assert (path.read_bytes() if path.exists() else None) == before
            draft.keep()
        assert path.read_bytes() == content
    assert entries(shelf) == ["file_1"]


def test_a_file_that_is_too_large_is_refused_and_gone(shelf: Shelf) -> None:
    with pytest.raises(PayloadTooLarge), shelf.draft(max_bytes=10) as draft:
        draft.write(b"x" * 10)
        draft.write(b"x")
    assert entries(shelf) == []


def test_a_full_disk_is_said_so_and_leaves_nothing(shelf: Shelf) -> None:
    """/dev/full takes nothing, like a disk that has no room."""
    with shelf.draft() as draft:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, draft._stream.fileno())
        os.close(full)
        with pytest.raises(Unavailable):
            draft.write(b"x" * 1_000_000)
    assert entries(shelf) == []


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("rows.jsonl", "rows.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\data\\rows.jsonl", "rows.jsonl"),
        ("a\r\nSet-Cookie: b\0", "a__Set-Cookie: b_"),
        ("", "file"),
        ("dir/", "file"),
        ("x" * 300, "x" * 255),
    ],
)
def test_a_filename_is_made_plain(db: Database, shelf: Shelf, owner: Any, given: str, kept: str) -> None:
    assert put(db, shelf, owner.tenant_id, filename=given).filename == kept


def test_somebody_elses_file_is_none(db: Database, shelf: Shelf, new_tenant: Callable[..., Any]) -> None:
    mine, theirs = new_tenant().tenant_id, new_tenant().tenant_id
    file = put(db, shelf, mine)
    with db.transaction() as session:
        for act in (files.find, files.hold, files.remove):
            with pytest.raises(NotFound):
                act(session, theirs, file.id)
        assert files.page(session, theirs, after=None, limit=10) == []


def test_pages_go_both_ways(db: Database, shelf: Shelf, owner: Any) -> None:
    ids = [put(db, shelf, owner.tenant_id).id for _ in range(3)]
    ids.sort()
    put(db, shelf, owner.tenant_id, purpose=files.BATCH_OUTPUT)

    def page(**options: Any) -> list[str]:
        with db.transaction() as session:
            return [file.id for file in files.page(session, owner.tenant_id, purpose="batch", **options)]

    assert page(after=None, limit=2) == [ids[2], ids[1]]
    assert page(after=ids[1], limit=2) == [ids[0]]
    assert page(after=ids[0], limit=5, oldest_first=True) == [ids[1], ids[2]]


def test_a_file_that_a_batch_reads_is_kept(db: Database, shelf: Shelf, owner: Any, settings: Settings) -> None:
    file = put(db, shelf, owner.tenant_id)
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    with db.transaction() as session:
        batch = batches.create(session, owner.tenant_id, batches.parse(body, settings), settings)
    with pytest.raises(Conflict, match=batch.id), db.transaction() as session:
        files.remove(session, owner.tenant_id, file.id)
    with db.transaction() as session:
        batches.find(session, owner.tenant_id, batch.id).status = "completed"
    with db.transaction() as session:
        files.remove(session, owner.tenant_id, file.id)
    with pytest.raises(NotFound), db.transaction() as session:
        files.find(session, owner.tenant_id, file.id)


def test_missing_bytes_are_not_found(shelf: Shelf) -> None:
    shelf.erase("file_never_was")
    with pytest.raises(NotFound):
        shelf.open("file_never_was")


def test_strays_go_after_a_while_and_files_stay(db: Database, shelf: Shelf, owner: Any) -> None:
    file = put(db, shelf, owner.tenant_id)
    with pytest.raises(RuntimeError), db.transaction() as session, shelf.draft("file_stray") as draft:
        files.add(session, owner.tenant_id, draft, filename="x", purpose="batch")
        raise RuntimeError  # rolled back after the file got its name
    abandoned = shelf.draft("file_cut")  # as a killed process leaves it
    draft_name = next(name for name in entries(shelf) if name.startswith(".file_cut"))
    with db.transaction() as session:
        assert files.remove_strays(session, shelf) == 0
        assert entries(shelf) == sorted([file.id, "file_stray", draft_name])
        assert files.remove_strays(session, shelf, older_than_s=-1) == 2
    assert entries(shelf) == [file.id]
    abandoned.__exit__(None, None, None)
