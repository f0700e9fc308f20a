"""/v1/admin: what operators see of all tenants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flask import Blueprint, Response, jsonify, request

from app import shares, waiting
from app.api.auth import authenticate_operator
from app.api.services import services
from app.errors import InvalidRequest
from app.shares import Served
from app.waiting import Depth

blueprint = Blueprint("admin", __name__, url_prefix="/v1/admin")
blueprint.before_request(authenticate_operator)

_WINDOW_S = 60
_MAX_WINDOW_S = 3600


@blueprint.get("/shares")
def read_shares() -> Response:
    """What tiers and tenants were served in the last `window_s` seconds."""
    window_s = _window_s()
    own = services()
    with own.database.autocommit() as session:
        served = shares.served(session, own.model.name, window_s=window_s)
        depths = waiting.depths(session, own.model.name)
    return jsonify(
        object="shares",
        model=own.model.name,
        window_s=window_s,
        tiers={depth.tier.value: _tier(depth, served) for depth in depths},
        tenants=[_tenant(each, served) for each in served],
    )


def _tier(depth: Depth, served: Sequence[Served]) -> dict[str, Any]:
    own = [each for each in served if each.tier is depth.tier]
    index = shares.fairness_index(own)
    return {
        "share": round(shares.share(own, served), 4),
        "floor": services().settings.tiers[depth.tier].floor,
        "tokens": sum(each.tokens for each in own),
        "fairness_index": None if index is None else round(index, 4),
        "queued": depth.queued,
        "running": depth.running,
        "oldest_wait_s": round(depth.oldest_wait_s, 3),
    }


def _tenant(each: Served, served: Sequence[Served]) -> dict[str, Any]:
    of_tier = [other for other in served if other.tier is each.tier]
    return {
        "name": each.name,
        "tier": each.tier.value,
        "weight": each.weight,
        "share_of_tier": round(shares.share([each], of_tier), 4),
        "prompt_tokens": each.prefilled,
        "completion_tokens": each.generated,
        "is_waiting": each.is_waiting,
    }


def _window_s() -> int:
    value = request.args.get("window_s", str(_WINDOW_S))
    if not (value.isascii() and value.isdigit() and len(value) < 10 and 1 <= int(value) <= _MAX_WINDOW_S):
        raise InvalidRequest(f"window_s must be a number of seconds from 1 to {_MAX_WINDOW_S}", param="window_s")
    return int(value)
