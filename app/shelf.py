"""The bytes of files, in the home under their ids.

A file is written as a draft and gets its name when it is whole and on the disk, so that no half file is ever seen.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from app.errors import NotFound, PayloadTooLarge, Unavailable
from app.ids import new_id
from app.settings import Settings


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
        self._is_kept = False
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
        """Make the file durable under its name, in place of an earlier one of that name. A second time does nothing."""
        if self._is_kept:
            return
        with _naming_a_full_disk():
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._path.replace(self._target)
            _sync(self._target.parent)
        self._is_kept = True

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
