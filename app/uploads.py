"""Uploads: files that come in parts, in any order, and are joined when the client says so.

    pending ──▶ completed | cancelled
       └─ expired: an hour after it began

A part is a file on the shelf without being one of the tenant's: it is gone once its upload has ended.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import Field
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from app import db, files
from app.bodies import Body
from app.errors import Conflict, InvalidRequest, NotFound, PayloadTooLarge, QueueFull
from app.files import ExpiresAfter
from app.ids import new_id
from app.settings import Settings
from app.shelf import Draft, Shelf
from app.tables import NOW, STATEMENT_TIME, File, Upload, UploadPart

MAX_PART_BYTES = 64 << 20
MAX_PENDING = 100
"""Uploads of a tenant that have not ended."""
MAX_PARTS = 10_000
"""Of one upload; and each is a row and a file."""
PENDING_FOR = timedelta(hours=1)
SHOWN_FOR = timedelta(days=1)
"""How long after that an upload can still be asked for."""
_PIECE_BYTES = 1 << 20
_MD5 = re.compile("[0-9a-f]{32}")


class Status(StrEnum):
    """Where an upload stands."""

    PENDING = "pending"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Request(Body):
    """The body of POST /v1/uploads."""

    bytes: Annotated[int, Field(ge=1)]
    filename: Annotated[str, Field(min_length=1, max_length=1024)]
    mime_type: Annotated[str, Field(max_length=256)]
    purpose: str
    expires_after: ExpiresAfter | None = None


class Completion(Body):
    """The body of POST /v1/uploads/{id}/complete: the parts in the order in which they are joined."""

    part_ids: Annotated[list[str], Field(min_length=1, max_length=MAX_PARTS)]
    md5: str | None = None


def create(session: Session, tenant_id: str, request: Request, settings: Settings) -> Upload:
    """Begin an upload. Raises InvalidRequest, PayloadTooLarge, and QueueFull when MAX_PENDING have not ended."""
    if request.purpose not in files.UPLOAD_PURPOSES:
        raise InvalidRequest(f"purpose must be one of {', '.join(files.UPLOAD_PURPOSES)}", param="purpose")
    if request.bytes > settings.max_file_bytes:
        raise PayloadTooLarge(f"A file has at most {settings.max_file_bytes} bytes", param="bytes")
    pending = select(func.count()).where(
        Upload.tenant_id == tenant_id, Upload.status == Status.PENDING, Upload.expires_at > STATEMENT_TIME
    )
    if (session.scalar(pending) or 0) >= MAX_PENDING:
        raise QueueFull("You have too many uploads that are not complete: complete or cancel one")
    moment = db.now(session)
    upload = Upload(
        id=new_id("upload"),
        tenant_id=tenant_id,
        filename=files.plain_name(request.filename),
        purpose=request.purpose,
        bytes=request.bytes,
        expires_after_s=None if request.expires_after is None else request.expires_after.seconds,
        status=Status.PENDING.value,
        created_at=moment,
        expires_at=moment + PENDING_FOR,
    )
    session.add(upload)
    session.flush()
    return upload


def find(session: Session, tenant_id: str, upload_id: str, *, to_change: bool = False) -> Upload:
    """The tenant's upload, locked where it is to be changed. Raises NotFound; somebody else's looks like none."""
    query = select(Upload).where(Upload.id == upload_id, Upload.tenant_id == tenant_id)
    upload = session.scalar(query.with_for_update() if to_change else query)
    if upload is None:
        raise NotFound(f"There is no upload '{upload_id}'", param="id")
    return upload


def status_of(session: Session, upload: Upload) -> Status:
    """Its status at this moment: time alone makes a pending one expired."""
    status = Status(upload.status)
    return Status.EXPIRED if status is Status.PENDING and upload.expires_at <= db.now(session) else status


def add_part(session: Session, tenant_id: str, upload_id: str, draft: Draft) -> UploadPart:
    """Keep the draft as a part.

    Raises NotFound, Conflict when the upload has ended, InvalidRequest where its parts exceed what was announced.
    """
    upload = _pending(session, tenant_id, upload_id)
    sums = select(func.count(), func.coalesce(func.sum(UploadPart.bytes), 0)).where(UploadPart.upload_id == upload.id)
    num_parts, num_bytes = session.execute(sums).one()
    if num_parts >= MAX_PARTS:
        raise InvalidRequest(f"An upload has at most {MAX_PARTS} parts", param="data")
    if num_bytes + draft.size > upload.bytes:
        raise InvalidRequest(f"The parts have more than the {upload.bytes} bytes of the upload", param="data")
    draft.keep()
    part = UploadPart(id=draft.file_id, upload_id=upload.id, bytes=draft.size, created_at=db.now(session))
    session.add(part)
    session.flush()
    return part


def _pending(session: Session, tenant_id: str, upload_id: str) -> Upload:
    """The upload, locked. Raises NotFound, and Conflict when it has ended."""
    upload = find(session, tenant_id, upload_id, to_change=True)
    if (status := status_of(session, upload)) is not Status.PENDING:
        raise Conflict(f"Upload '{upload_id}' is {status.value}")
    return upload


def chosen_parts(session: Session, upload: Upload, part_ids: Sequence[str]) -> list[str]:
    """The ids of an upload's parts as they are to be joined. Raises InvalidRequest, naming the field."""
    if len(set(part_ids)) < len(part_ids):
        raise InvalidRequest("part_ids names a part twice", param="part_ids")
    parts = session.scalars(select(UploadPart).where(UploadPart.upload_id == upload.id))
    sizes = {part.id: part.bytes for part in parts}
    for position, part_id in enumerate(part_ids):
        if part_id not in sizes:
            path = f"part_ids[{position}]"
            raise InvalidRequest(f"{path}: upload '{upload.id}' has no part '{part_id[:64]}'", param=path)
    total = sum(sizes[part_id] for part_id in part_ids)
    if total != upload.bytes:
        raise InvalidRequest(f"The parts have {total} bytes, not the {upload.bytes} of the upload", param="part_ids")
    return list(part_ids)


def join(shelf: Shelf, part_ids: Sequence[str], draft: Draft, *, md5: str | None) -> None:
    """Write the parts' bytes into the draft.

    Raises InvalidRequest where md5 is another one, and NotFound where a part is gone.
    """
    if md5 is not None and not _MD5.fullmatch(md5.lower()):
        raise InvalidRequest("md5 must be 32 hexadecimal digits", param="md5")
    digest = hashlib.md5(usedforsecurity=False)
    for part_id in part_ids:
        with shelf.open(part_id) as stream:
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
                draft.write(piece)
    if md5 is not None and not hmac.compare_digest(digest.hexdigest(), md5.lower()):
        raise InvalidRequest("md5 is not that of the joined parts", param="md5")


def complete(session: Session, tenant_id: str, upload_id: str, draft: Draft) -> tuple[Upload, File, list[str]]:
    """End a pending upload with the file that the draft becomes; its parts are to be erased after the commit.

    Raises NotFound, and Conflict when it has ended meanwhile.
    """
    upload = _pending(session, tenant_id, upload_id)
    file = files.add(
        session,
        tenant_id,
        draft,
        filename=upload.filename,
        purpose=upload.purpose,
        expires_after_s=upload.expires_after_s,
    )
    upload.status, upload.file_id = Status.COMPLETED.value, file.id
    return upload, file, _drop_parts(session, [upload.id])


def cancel(session: Session, tenant_id: str, upload_id: str) -> tuple[Upload, list[str]]:
    """End an upload without a file; the ids of its parts are to be erased after the commit. A second time is no error.

    Raises NotFound, and Conflict when it has become a file or expired.
    """
    upload = find(session, tenant_id, upload_id, to_change=True)
    match status_of(session, upload):
        case Status.CANCELLED:
            return upload, []
        case Status.PENDING:
            upload.status = Status.CANCELLED.value
            return upload, _drop_parts(session, [upload.id])
        case status:
            raise Conflict(f"Upload '{upload_id}' is {status.value}: it cannot be cancelled")


def _drop_parts(session: Session, upload_ids: Collection[str]) -> list[str]:
    return list(
        session.scalars(delete(UploadPart).where(UploadPart.upload_id.in_(upload_ids)).returning(UploadPart.id))
    )


def remove_bygone(session: Session) -> list[str]:
    """Drop the parts of uploads that expired, and forget uploads a day later; the ids of what is to be erased."""
    over = session.scalars(
        select(Upload.id).where(Upload.expires_at <= STATEMENT_TIME).with_for_update(skip_locked=True)
    ).all()
    dropped = _drop_parts(session, over)
    session.execute(delete(Upload).where(Upload.id.in_(over), Upload.expires_at <= NOW - SHOWN_FOR))
    return dropped
