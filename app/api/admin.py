"""/v1/admin: what operators see of all tenants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from flask import Blueprint, Response, jsonify, request
from pydantic import Field

from app import shares, waiting
from app.api import shapes
from app.api.auth import authenticate_operator
from app.api.operations import described
from app.api.services import services
from app.errors import InvalidRequest
from app.shares import Served
from app.waiting import Depth

blueprint = Blueprint("admin", __name__, url_prefix="/v1/admin")
blueprint.before_request(authenticate_operator)

_WINDOW_S = 60
_MAX_WINDOW_S = 3600


@blueprint.get("/shares")
@described(query={"window_s": Annotated[int, Field(ge=1, le=_MAX_WINDOW_S)]}, answers={200: shapes.Shares})
def read_shares() -> Response:
    """What tiers and tenants were served in the last `window_s` seconds."""
    window_s = _window_s()
    own = services()
    with own.database.autocommit() as session:
        served = shares.served(session, own.model.name, window_s=window_s)
        depths = waiting.depths(session, own.model.name)
    by_tier = shares.by_tier(served)
    tokens = {tier: shares.tokens(own) for tier, own in by_tier.items()}
    return jsonify(
        object="shares",
        model=own.model.name,
        window_s=window_s,
        tiers={
            depth.tier.value: _tier(depth, by_tier[depth.tier], tokens[depth.tier], sum(tokens.values()))
            for depth in depths
        },
        tenants=[_tenant(each, tokens[each.tier]) for each in served],
    )


def _tier(depth: Depth, served: Sequence[Served], tokens: int, tokens_of_all: int) -> dict[str, Any]:
    index = shares.fairness_index(served)
    return {
        "share": round(shares.share(tokens, tokens_of_all), 4),
        "floor": services().settings.tiers[depth.tier].floor,
        "tokens": tokens,
        "fairness_index": None if index is None else round(index, 4),
        "queued": depth.queued,
        "running": depth.running,
        "oldest_wait_s": round(depth.oldest_wait_s, 3),
    }


def _tenant(each: Served, tokens_of_tier: int) -> dict[str, Any]:
    return {
        "name": each.name,
        "tier": each.tier.value,
        "weight": each.weight,
        "share_of_tier": round(shares.share(each.tokens, tokens_of_tier), 4),
        "prompt_tokens": each.prefilled,
        "completion_tokens": each.generated,
        "is_waiting": each.is_waiting,
    }


def _window_s() -> int:
    value = request.args.get("window_s", str(_WINDOW_S))
    if not (value.isascii() and value.isdigit() and len(value) < 10 and 1 <= int(value) <= _MAX_WINDOW_S):
        raise InvalidRequest(f"window_s must be a number of seconds from 1 to {_MAX_WINDOW_S}", param="window_s")
    return int(value)
