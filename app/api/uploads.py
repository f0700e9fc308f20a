"""/v1/uploads: a file in parts. OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from flask import Blueprint, Response, jsonify
from pydantic import Field
from typing_extensions import TypedDict

from app import files, submissions, uploads
from app.api import shapes
from app.api.auth import authenticate, tenant
from app.api.bodies import read_object
from app.api.files import file_object
from app.api.forms import received_form
from app.api.operations import described
from app.api.pages import checked_id
from app.api.services import services
from app.errors import Conflict, NotFound
from app.ids import new_id
from app.shelf import Shelf
from app.tables import File, Upload
from app.uploads import Completion, Request, Status

blueprint = Blueprint("uploads", __name__, url_prefix="/v1/uploads")
blueprint.before_request(authenticate)


@blueprint.post("")
@described(body=Request, answers={200: shapes.Upload})
def create() -> Response:
    """Begin a file in parts."""
    own = services()
    request = submissions.validated(Request, read_object())
    with own.database.transaction() as session:
        upload = uploads.create(session, tenant().id, request, own.settings)
    return jsonify(upload_object(upload, Status.PENDING))


class _PartForm(TypedDict):
    data: Annotated[bytes, Field(json_schema_extra={"format": "binary"})]


@blueprint.post("/<upload_id>/parts")
@described(form=_PartForm, answers={200: shapes.UploadPart})
def add_part(upload_id: str) -> Response:
    """200 means that the part is durable."""
    upload_id = checked_id("upload", upload_id)
    part_id = new_id("part")
    with received_form(_shelf(), file="data", max_bytes=uploads.MAX_PART_BYTES, file_id=part_id) as form:
        with services().database.transaction() as session:
            part = uploads.add_part(session, tenant().id, upload_id, form.draft)
        created_at = int(part.created_at.timestamp())
        return jsonify(id=part.id, object="upload.part", created_at=created_at, upload_id=upload_id)


@blueprint.post("/<upload_id>/complete")
@described(body=Completion, answers={200: shapes.Upload})
def complete(upload_id: str) -> Response:
    """The file, durable. Of one that is complete already, whose answer was lost perhaps, it is answered again."""
    own = services()
    upload_id = checked_id("upload", upload_id)
    wanted = submissions.validated(Completion, read_object())
    with own.database.autocommit() as session:
        upload = uploads.find(session, tenant().id, upload_id)
        match uploads.status_of(session, upload):
            case Status.COMPLETED:
                assert upload.file_id is not None
                return jsonify(_completed(upload, files.find(session, tenant().id, upload.file_id)))
            case Status.PENDING:
                part_ids = uploads.chosen_parts(session, upload, wanted.part_ids)
            case status:
                raise Conflict(f"Upload '{upload_id}' is {status.value}")
    # Joined between transactions: Postgres ends one that waits for its process.
    with _shelf().draft() as draft:
        try:
            uploads.join(_shelf(), part_ids, draft, md5=wanted.md5)
        except NotFound:
            raise Conflict(f"Upload '{upload_id}' ended meanwhile") from None
        with own.database.transaction() as session:
            upload, file, parts = uploads.complete(session, tenant().id, upload_id, draft)
            answer = jsonify(_completed(upload, file))
    _erase(parts)
    return answer


@blueprint.post("/<upload_id>/cancel")
@described(answers={200: shapes.Upload})
def cancel(upload_id: str) -> Response:
    """Drop the parts. A body is ignored: clients send an empty one."""
    with services().database.transaction() as session:
        upload, parts = uploads.cancel(session, tenant().id, checked_id("upload", upload_id))
        answer = jsonify(upload_object(upload, Status.CANCELLED))
    _erase(parts)
    return answer


def upload_object(upload: Upload, status: Status) -> dict[str, Any]:
    return {
        "id": upload.id,
        "object": "upload",
        "bytes": upload.bytes,
        "created_at": int(upload.created_at.timestamp()),
        "expires_at": int(upload.expires_at.timestamp()),
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": status.value,
        "file": None,
    }


def _completed(upload: Upload, file: File) -> dict[str, Any]:
    return {**upload_object(upload, Status.COMPLETED), "file": file_object(file)}


def _erase(part_ids: Iterable[str]) -> None:
    for part_id in part_ids:
        _shelf().erase(part_id)


def _shelf() -> Shelf:
    return Shelf(services().settings)
