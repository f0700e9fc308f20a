"""/v1/files: upload, read, list, delete. OpenAI's shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from flask import Blueprint, Response, jsonify, request, send_file
from pydantic import Field
from typing_extensions import TypedDict

from app import files
from app.api import shapes
from app.api.auth import authenticate, tenant
from app.api.forms import received_form
from app.api.operations import Stream, described
from app.api.pages import asked_page, checked_id, listing, page_query
from app.api.services import services
from app.errors import InvalidRequest, NotFound
from app.files import ExpiresAfter
from app.shelf import Shelf
from app.submissions import validated
from app.tables import File

blueprint = Blueprint("files", __name__, url_prefix="/v1/files")
blueprint.before_request(authenticate)

_MAX_PAGE = 10_000
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_NUMBER = re.compile("[0-9]{1,9}")
_FIELDS = ("purpose", _ANCHOR, _SECONDS)


class _UploadForm(TypedDict):
    file: Annotated[bytes, Field(json_schema_extra={"format": "binary"})]
    purpose: Literal["batch"]


@blueprint.post("")
@described(form=_UploadForm, answers={200: shapes.File})
def upload() -> Response:
    """200 means that the file is durable: it was synced, and its row committed, before this answer."""
    max_bytes = services().settings.max_file_bytes
    with received_form(_shelf(), file="file", fields=_FIELDS, max_bytes=max_bytes) as form:
        purpose = _one_of(files.UPLOAD_PURPOSES, form.fields.get("purpose"), "purpose")
        if purpose is None:
            raise InvalidRequest("purpose is missing", param="purpose")
        expires_after = _expires_after(form.fields)
        with services().database.transaction() as session:
            file = files.add(
                session,
                tenant().id,
                form.draft,
                filename=form.filename,
                purpose=purpose,
                expires_after_s=None if expires_after is None else expires_after.seconds,
            )
        return jsonify(file_object(file))


@blueprint.get("")
@described(
    query={
        **page_query("file", max_limit=_MAX_PAGE),
        "purpose": Literal[files.PURPOSES],
        "order": Literal["asc", "desc"],
    },
    answers={200: shapes.Files},
)
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
@described(answers={200: shapes.File})
def read(file_id: str) -> Response:
    """What the file is."""
    return jsonify(file_object(_find(file_id)))


@blueprint.get("/<file_id>/content")
@described(answers={200: Stream("application/octet-stream", "The file's bytes.")})
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
@described(answers={200: shapes.DeletedFile})
def delete(file_id: str) -> Response:
    """Remove the file; a 409 while a batch reads it."""
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
        "expires_at": None if file.expires_at is None else int(file.expires_at.timestamp()),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def _expires_after(fields: Mapping[str, str]) -> ExpiresAfter | None:
    """How long the file is to be kept, where the form says it. Raises InvalidRequest."""
    if _ANCHOR not in fields and _SECONDS not in fields:
        return None
    seconds = fields.get(_SECONDS, "")
    said = {"anchor": fields.get(_ANCHOR), "seconds": int(seconds) if _NUMBER.fullmatch(seconds) else seconds}
    try:
        return validated(ExpiresAfter, said)
    except InvalidRequest as refusal:
        raise InvalidRequest(refusal.message, param=f"expires_after[{refusal.param}]") from None


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
