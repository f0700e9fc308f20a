"""/v1/files: upload, read, list, delete. OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from flask import Blueprint, Response, jsonify, request, send_file
from werkzeug.formparser import FormDataParser

from app import files
from app.api.auth import authenticate, tenant
from app.api.pages import asked_page, checked_id, listing
from app.api.services import services
from app.errors import InvalidRequest, MalformedBody, NotFound, PayloadTooLarge
from app.shelf import Draft, Shelf
from app.tables import File

blueprint = Blueprint("files", __name__, url_prefix="/v1/files")
blueprint.before_request(authenticate)

_MAX_PAGE = 10_000
_MAX_FIELD_BYTES = 1 << 20
"""Of the form beside the file; no more than that of the file is held either, which is read 64 KiB at a time."""
_MAX_PARTS = 8


@blueprint.post("")
def upload() -> Response:
    """200 means that the file is durable: it was synced, and its row committed, before this answer."""
    with _received() as form:
        purpose = _one_of(files.UPLOAD_PURPOSES, form.purpose, "purpose")
        if purpose is None:
            raise InvalidRequest("purpose is missing", param="purpose")
        with services().database.transaction() as session:
            file = files.add(session, tenant().id, form.draft, filename=form.filename, purpose=purpose)
        return jsonify(file_object(file))


@blueprint.get("")
def list_files() -> Response:
    """The tenant's files, newest first unless order=asc."""
    page = asked_page("file", limit=_MAX_PAGE, max_limit=_MAX_PAGE)
    purpose = _one_of(files.PURPOSES, request.args.get("purpose"), "purpose")
    order = _one_of(("asc", "desc"), request.args.get("order"), "order")
    with services().database.autocommit() as session:
        found = files.page(
            session,
            tenant().id,
            after=page.after,
            limit=page.to_fetch,
            purpose=purpose,
            oldest_first=order == "asc",
        )
    return listing(found, page, file_object)


@blueprint.get("/<file_id>")
def read(file_id: str) -> Response:
    return jsonify(file_object(_find(file_id)))


@blueprint.get("/<file_id>/content")
def content(file_id: str) -> Response:
    """The file's bytes, streamed from the disk; a Range may be asked for."""
    file = _find(file_id)
    try:
        return send_file(
            _shelf().path(file.id).absolute(),
            mimetype="application/octet-stream",
            as_attachment=True,
            download_name=file.filename,
            etag=file.id,
        )
    except FileNotFoundError:
        raise NotFound(f"The content of file '{file_id}' is gone", param="id") from None


@blueprint.delete("/<file_id>")
def delete(file_id: str) -> Response:
    with services().database.transaction() as session:
        files.remove(session, tenant().id, checked_id("file", file_id))
    _shelf().erase(file_id)
    return jsonify(id=file_id, object="file", deleted=True)


def file_object(file: File) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at.timestamp()),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def _find(file_id: str) -> File:
    with services().database.autocommit() as session:
        return files.find(session, tenant().id, checked_id("file", file_id))


def _shelf() -> Shelf:
    return Shelf(services().settings)


def _one_of(choices: Sequence[str], value: str | None, name: str) -> str | None:
    """The value, which may be left out. Raises InvalidRequest."""
    if value is not None and value not in choices:
        raise InvalidRequest(f"{name} must be one of {', '.join(choices)}", param=name)
    return value


# ---- the form


@dataclass(frozen=True, slots=True)
class _Form:
    """An upload: its file, written to the disk, and what was said about it."""

    draft: Draft
    filename: str
    purpose: str | None


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
def _received() -> Iterator[_Form]:
    """Read the request's form, its file straight to the disk. The draft is gone afterwards, unless it was kept.

    Raises MalformedBody, InvalidRequest, PayloadTooLarge.
    """
    if request.mimetype != "multipart/form-data":
        raise MalformedBody("Send the file as multipart/form-data")
    max_bytes = services().settings.max_file_bytes
    if request.content_length is not None and request.content_length > max_bytes + _MAX_FIELD_BYTES:
        raise PayloadTooLarge(f"The file is larger than {max_bytes} bytes", param="file")
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
                raise InvalidRequest("Send one file", param="file")
            drafts.append(open_drafts.enter_context(_shelf().draft(max_bytes=max_bytes)))
            return _Part(drafts[0])

        parser = FormDataParser(
            start_part, max_form_memory_size=_MAX_FIELD_BYTES, silent=False, max_form_parts=_MAX_PARTS
        )
        try:
            _, fields, parts = parser.parse(
                request.stream, request.mimetype, request.content_length, request.mimetype_params
            )
        except ValueError as error:
            raise MalformedBody(f"The body is not multipart/form-data: {error}") from None
        for name in (*fields, *parts):
            if name is None:
                raise MalformedBody("A part has no name")
            if name not in ("purpose", "file"):
                raise InvalidRequest(f"There is no field '{name[:64]}'", param=name[:64])
        if "file" not in parts:
            raise InvalidRequest("file is missing: send it as a part with a filename", param="file")
        yield _Form(drafts[0], parts["file"].filename or "", fields.get("purpose"))
