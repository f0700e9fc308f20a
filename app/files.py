"""Files: uploaded and generated ones. A row says whose a file is; its bytes lie in the home, under its id.

A file is written as a draft and gets its name when it is whole and on the disk, so that no half file is ever seen.
Bytes without a row, of an upload that a crash cut off for instance, are strays: they are removed after a day.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from app.errors import Conflict, NotFound, PayloadTooLarge, Unavailable
from app.ids import new_id
from app.settings import Settings
from app.tables import Batch, File

UPLOAD_PURPOSES = ("batch",)
"""What a client may upload a file for."""
BATCH_OUTPUT = "batch_output"
"""The purpose of files that a batch wrote."""
PURPOSES = (*UPLOAD_PURPOSES, BATCH_OUTPUT)
STRAY_AFTER_S = 86_400.0

_MAX_FILENAME_LENGTH = 255


# ---- bytes


class Shelf:
    """Where the bytes of a home's files lie."""

    def __init__(self, settings: Settings) -> None:
        self.directory = settings.home / "files"

    def path(self, file_id: str) -> Path:
        return self.directory / file_id

    def draft(self, file_id: str | None = None, *, max_bytes: int | None = None) -> Draft:
        """A file to be written, under a fresh id where none is given."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Draft(self.directory, file_id or new_id("file"), max_bytes)

    def open(self, file_id: str) -> BinaryIO:
        """Raises NotFound when the bytes are not there."""
        try:
            return self.path(file_id).open("rb")
        except FileNotFoundError:
            raise NotFound(f"The content of file '{file_id}' is gone", param="id") from None

    def erase(self, file_id: str) -> None:
        """Remove a file's bytes. For after the commit that removed its row."""
        self.path(file_id).unlink(missing_ok=True)


class Draft:
    """A file being written. keep() gives it its name; left without that, it is gone.

    Writing raises PayloadTooLarge beyond max_bytes, and Unavailable when the disk is full.
    """

    def __init__(self, directory: Path, file_id: str, max_bytes: int | None) -> None:
        self.file_id = file_id
        self.size = 0
        """Bytes written."""
        self._max_bytes = max_bytes
        self._target = directory / file_id
        self._path = directory / f".{file_id}.{secrets.token_hex(4)}"
        self._stream = self._path.open("xb")

    def write(self, data: bytes) -> int:
        self.size += len(data)
        if self._max_bytes is not None and self.size > self._max_bytes:
            raise PayloadTooLarge(f"The file is larger than {self._max_bytes} bytes", param="file")
        with _naming_a_full_disk():
            return self._stream.write(data)

    def keep(self) -> None:
        """Make the file durable under its name, in place of an earlier one of that name."""
        with _naming_a_full_disk():
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._path.replace(self._target)
            _sync(self._target.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):  # a last flush onto a full disk; what was kept is already there
            self._stream.close()
        self._path.unlink(missing_ok=True)


@contextmanager
def _naming_a_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Unavailable("The server's disk is full") from error


def _sync(directory: Path) -> None:
    """Make a rename durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- rows


def add(session: Session, tenant_id: str, draft: Draft, *, filename: str, purpose: str) -> File:
    """Keep the draft and write its row. A crash, or a rollback, before the commit leaves a stray."""
    draft.keep()
    file = File(
        id=draft.file_id,
        tenant_id=tenant_id,
        filename=_plain_name(filename),
        purpose=purpose,
        bytes=draft.size,
    )
    session.add(file)
    session.flush()
    session.refresh(file)
    return file


def _plain_name(filename: str) -> str:
    """A client's name for a file, without its directories and without what a header or a terminal could trip over."""
    name = re.split(r"[/\\]", filename)[-1]
    return re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]", "_", name)[-_MAX_FILENAME_LENGTH:] or "file"


def find(session: Session, tenant_id: str, file_id: str) -> File:
    """The tenant's file. Raises NotFound; somebody else's file looks the same as none."""
    file = session.scalar(select(File).where(File.id == file_id, File.tenant_id == tenant_id))
    if file is None:
        raise NotFound(f"There is no file '{file_id}'", param="id")
    return file


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
    query = select(File).where(File.tenant_id == tenant_id)
    if after is not None:
        query = query.where(File.id > after if oldest_first else File.id < after)
    if purpose is not None:
        query = query.where(File.purpose == purpose)
    return list(session.scalars(query.order_by(File.id if oldest_first else File.id.desc()).limit(limit)))


def hold(session: Session, tenant_id: str, file_id: str) -> File:
    """The tenant's file, which nobody removes before this transaction ends. Raises NotFound."""
    file = session.scalar(
        select(File).where(File.id == file_id, File.tenant_id == tenant_id).with_for_update(read=True)
    )
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


def remove_strays(session: Session, shelf: Shelf, *, older_than_s: float = STRAY_AFTER_S) -> int:
    """Erase old bytes that no row names. Returns how many files that were."""
    if not shelf.directory.is_dir():
        return 0
    last_moment = time.time() - older_than_s
    old = {path.name for path in shelf.directory.iterdir() if _is_older(path, last_moment)}
    strays = old - set(session.scalars(select(File.id).where(File.id.in_(old))))
    for name in strays:
        shelf.erase(name)
    return len(strays)


def _is_older(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime < moment
    except FileNotFoundError:
        return False  # a draft that has just got its name
