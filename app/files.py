"""Files: uploaded and generated ones. A row says whose a file is; its bytes lie on the shelf, under its id.

A file may expire: nobody finds it any more from then on, but a batch that reads it goes on. Bytes without a row, of an
upload that a crash cut off for instance, are strays: they are removed after a day.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from sqlalchemy import ColumnElement, delete, or_, select
from sqlalchemy.orm import Session

from app import db
from app.bodies import Body
from app.errors import Conflict, NotFound
from app.shelf import Draft, Shelf
from app.tables import STATEMENT_TIME, Batch, File, UploadPart

UPLOAD_PURPOSES = ("batch",)
"""What a client may upload a file for."""
BATCH_OUTPUT = "batch_output"
"""The purpose of files that a batch wrote."""
PURPOSES = (*UPLOAD_PURPOSES, BATCH_OUTPUT)
STRAY_AFTER_S = 86_400.0

_MAX_FILENAME_LENGTH = 255


class ExpiresAfter(Body):
    """How long a file is kept, as clients say it."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3_600, le=2_592_000)]


def add(
    session: Session,
    tenant_id: str,
    draft: Draft,
    *,
    filename: str,
    purpose: str,
    expires_after_s: int | None = None,
) -> File:
    """Keep the draft and write its row. A crash, or a rollback, before the commit leaves a stray."""
    draft.keep()
    moment = db.now(session)
    file = File(
        id=draft.file_id,
        tenant_id=tenant_id,
        filename=plain_name(filename),
        purpose=purpose,
        bytes=draft.size,
        created_at=moment,
        expires_at=None if expires_after_s is None else moment + timedelta(seconds=expires_after_s),
    )
    session.add(file)
    session.flush()
    return file


def plain_name(filename: str) -> str:
    """A client's name for a file, without its directories and without what a header or a terminal could trip over."""
    name = re.split(r"[/\\]", filename)[-1]
    return re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]", "_", name)[-_MAX_FILENAME_LENGTH:] or "file"


def find(session: Session, tenant_id: str, file_id: str) -> File:
    """The tenant's file. Raises NotFound; somebody else's file looks the same as none."""
    file = session.scalar(select(File).where(File.id == file_id, *_own(tenant_id)))
    if file is None:
        raise NotFound(f"There is no file '{file_id}'", param="id")
    return file


def _own(tenant_id: str) -> list[ColumnElement[bool]]:
    """The tenant's files that have not expired."""
    return [File.tenant_id == tenant_id, or_(File.expires_at.is_(None), File.expires_at > STATEMENT_TIME)]


def page(
    session: Session,
    tenant_id: str,
    *,
    after: str | None,
    limit: int,
    purpose: str | None = None,
    oldest_first: bool = False,
) -> list[File]:
    """The tenant's files from behind the file id after, at most limit of them."""
    query = select(File).where(*_own(tenant_id))
    if after is not None:
        query = query.where(File.id > after if oldest_first else File.id < after)
    if purpose is not None:
        query = query.where(File.purpose == purpose)
    return list(session.scalars(query.order_by(File.id if oldest_first else File.id.desc()).limit(limit)))


def hold(session: Session, tenant_id: str, file_id: str) -> File:
    """The tenant's file, which nobody removes before this transaction ends. Raises NotFound."""
    file = session.scalar(select(File).where(File.id == file_id, *_own(tenant_id)).with_for_update(read=True))
    if file is None:
        raise NotFound(f"There is no file '{file_id}'", param="input_file_id")
    return file


def remove(session: Session, tenant_id: str, file_id: str) -> None:
    """Remove the row of the tenant's file; the bytes are erased after the commit.

    Raises NotFound, and Conflict while a batch reads the file.
    """
    find(session, tenant_id, file_id)
    session.execute(select(File.id).where(File.id == file_id).with_for_update())
    reader = session.scalar(
        select(Batch.id).where(Batch.input_file_id == file_id, Batch.status.in_(Batch.OPEN)).limit(1)
    )
    if reader is not None:
        raise Conflict(f"Batch '{reader}' still reads file '{file_id}'")
    session.execute(delete(File).where(File.id == file_id))


def remove_expired(session: Session) -> list[str]:
    """Remove the rows of files that have expired and that no batch reads; their ids, to be erased after the commit."""
    # Locked first: a batch that took one at its last moment is then seen by the next statement.
    is_over = File.expires_at <= STATEMENT_TIME
    over = session.scalars(select(File.id).where(is_over).with_for_update(skip_locked=True)).all()
    is_read = select(Batch.id).where(Batch.input_file_id == File.id, Batch.status.in_(Batch.OPEN)).exists()
    return list(session.scalars(delete(File).where(File.id.in_(over), ~is_read).returning(File.id)))


def remove_strays(session: Session, shelf: Shelf, *, older_than_s: float = STRAY_AFTER_S) -> int:
    """Erase old bytes that no row names. Returns how many files that were."""
    if not shelf.directory.is_dir():
        return 0
    last_moment = time.time() - older_than_s
    old = {path.name for path in shelf.directory.iterdir() if _is_older(path, last_moment)}
    named = select(File.id).where(File.id.in_(old)).union_all(select(UploadPart.id).where(UploadPart.id.in_(old)))
    strays = old - set(session.scalars(named))
    for name in strays:
        shelf.erase(name)
    return len(strays)


def _is_older(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime < moment
    except FileNotFoundError:
        return False  # a draft that has just got its name
