"""/v1/batches: create, read, list, cancel. OpenAI's shapes, with a webhook beside them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from flask import Blueprint, Response, jsonify

from app import batches
from app.api import shapes
from app.api.auth import authenticate, tenant
from app.api.bodies import read_object
from app.api.operations import described
from app.api.pages import asked_page, checked_id, listing, page_query
from app.api.services import services
from app.batches import Counts
from app.tables import Batch

blueprint = Blueprint("batches", __name__, url_prefix="/v1/batches")
blueprint.before_request(authenticate)

_PAGE = 20
_MAX_PAGE = 100
_MOMENTS = (
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


@blueprint.post("")
@described(body=batches.Request, answers={200: shapes.Batch})
def create() -> Response:
    """Run the requests of a file."""
    own = services()
    wanted = batches.parse(read_object(), own.settings)
    with own.database.transaction() as session:
        batch = batches.create(session, tenant().id, wanted, own.settings)
        counts = batches.count(session, [batch])
    return jsonify(batch_object(batch, counts[batch.id]))


@blueprint.get("")
@described(query=page_query("batch", max_limit=_MAX_PAGE), answers={200: shapes.Batches})
def list_batches() -> Response:
    """The tenant's batches, newest first."""
    page = asked_page("batch", limit=_PAGE, max_limit=_MAX_PAGE)
    with services().database.autocommit() as session:
        found = batches.page(session, tenant().id, after=page.after, limit=page.to_fetch)
        counts = batches.count(session, found)
    return listing(found, page, lambda batch: batch_object(batch, counts[batch.id]))


@blueprint.get("/<batch_id>")
@described(answers={200: shapes.Batch})
def read(batch_id: str) -> Response:
    """Where the batch stands."""
    with services().database.autocommit() as session:
        batch = batches.find(session, tenant().id, checked_id("batch", batch_id))
        counts = batches.count(session, [batch])
    return jsonify(batch_object(batch, counts[batch.id]))


@blueprint.post("/<batch_id>/cancel")
@described(answers={200: shapes.Batch})
def cancel(batch_id: str) -> Response:
    """From the commit on none of its jobs goes on. A body is ignored: clients send an empty one."""
    with services().database.transaction() as session:
        batch, moved = batches.cancel(session, tenant().id, checked_id("batch", batch_id))
        counts = batches.count(session, [batch])
    services().publish(moved)
    services().dispatcher.nudge()
    return jsonify(batch_object(batch, counts[batch.id]))


def batch_object(batch: Batch, counts: Counts) -> dict[str, Any]:
    """A batch as clients see it. Its files have ids once it has ended, and only those that were written."""
    has_ended = batch.status not in Batch.OPEN
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": services().model.name,
        "errors": batch.errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id if has_ended else None,
        "error_file_id": batch.error_file_id if has_ended else None,
        **{name: _seconds(getattr(batch, name)) for name in _MOMENTS},
        "request_counts": counts.shown,
        "usage": _usage(counts),
        "metadata": batch.batch_metadata,
    }


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())


def _usage(counts: Counts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
