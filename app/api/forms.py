"""Multipart forms with one file, which goes straight to the disk."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from flask import request
from werkzeug.formparser import FormDataParser

from app.errors import InvalidRequest, MalformedBody, PayloadTooLarge
from app.shelf import Draft, Shelf

_MAX_FIELD_BYTES = 1 << 20
"""Of the form beside the file; no more than that of the file is held either, which is read 64 KiB at a time."""
_MAX_PARTS = 8


@dataclass(frozen=True, slots=True)
class Form:
    """What was sent: a file, written to the disk, and what was said about it."""

    draft: Draft
    filename: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Part:
    """What the form's parser writes the file's part to, as it comes."""

    draft: Draft

    def write(self, data: bytes) -> int:
        return self.draft.write(data)

    def seek(self, offset: int) -> None:
        """The parser rewinds what it has written; nobody reads it from here."""

    def close(self) -> None:
        """The draft ends with the request."""


@contextmanager
def received_form(
    shelf: Shelf, *, file: str, fields: Collection[str] = (), max_bytes: int, file_id: str | None = None
) -> Iterator[Form]:
    """Read the request's form: its file, in the part of that name, and its fields, of which no others may be there.

    The file becomes a draft under file_id, or a fresh id. It is gone afterwards, unless it was kept.
    Raises MalformedBody, InvalidRequest, PayloadTooLarge beyond max_bytes.
    """
    if request.mimetype != "multipart/form-data":
        raise MalformedBody("Send the file as multipart/form-data")
    if request.content_length is not None and request.content_length > max_bytes + _MAX_FIELD_BYTES:
        raise PayloadTooLarge(f"The file is larger than {max_bytes} bytes", param=file)
    request.max_content_length = max_bytes + _MAX_FIELD_BYTES
    with ExitStack() as open_drafts:
        drafts: list[Draft] = []

        def start_part(
            total_content_length: int | None,
            content_type: str | None,
            filename: str | None,
            content_length: int | None = None,
        ) -> Any:
            if drafts:
                raise InvalidRequest("Send one file", param=file)
            drafts.append(open_drafts.enter_context(shelf.draft(file_id, max_bytes=max_bytes)))
            return _Part(drafts[0])

        parser = FormDataParser(
            start_part, max_form_memory_size=_MAX_FIELD_BYTES, silent=False, max_form_parts=_MAX_PARTS
        )
        try:
            _, texts, parts = parser.parse(
                request.stream, request.mimetype, request.content_length, request.mimetype_params
            )
        except ValueError as error:
            raise MalformedBody(f"The body is not multipart/form-data: {error}") from None
        for name in (*texts, *parts):
            if name is None:
                raise MalformedBody("A part has no name")
            if name != file and name not in fields:
                raise InvalidRequest(f"There is no field '{name[:64]}'", param=name[:64])
        if file not in parts:
            raise InvalidRequest(f"{file} is missing: send it as a part with a filename", param=file)
        yield Form(drafts[0], parts[file].filename or "", texts)
