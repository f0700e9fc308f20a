"""/v1/queue: how long the lines are."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, jsonify

from app import waiting
from app.api import shapes
from app.api.auth import authenticate
from app.api.operations import described
from app.api.services import services
from app.waiting import Depth

blueprint = Blueprint("waiting", __name__, url_prefix="/v1/queue")
blueprint.before_request(authenticate)


@blueprint.get("")
@described(answers={200: shapes.Queue})
def read() -> Response:
    """Of all tenants together: nobody's own jobs can be told from it."""
    own = services()
    with own.database.autocommit() as session:
        depths = waiting.depths(session, own.model.name)
    return jsonify(object="queue", model=own.model.name, tiers={depth.tier.value: _shown(depth) for depth in depths})


def _shown(depth: Depth) -> dict[str, Any]:
    return {
        "queued": depth.queued,
        "running": depth.running,
        "oldest_wait_s": round(depth.oldest_wait_s, 3),
        "starts_per_s": round(depth.starts_per_s, 3),
    }
