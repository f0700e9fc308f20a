"""/v1/usage: what was charged, as JSON or as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

from flask import Blueprint, Response, jsonify, request

from app import usage
from app.api import shapes
from app.api.auth import authenticate, tenant
from app.api.operations import Stream, described
from app.api.services import services
from app.errors import InvalidRequest
from app.usage import Usage

blueprint = Blueprint("usage", __name__, url_prefix="/v1/usage")
blueprint.before_request(authenticate)

_FORMATS = ("json", "csv")
_DAYS = 30
_MAX_DAYS = 366


@blueprint.get("")
@described(
    query={"start": shapes.Day, "end": shapes.Day, "format": Literal[_FORMATS]},
    answers={200: (shapes.UsageList, Stream("text/csv", "The same rows, with a header line."))},
)
def read() -> Response:
    """By day, model and tier, from `start` to `end`, both included; the last 30 days where the query names none."""
    end = _asked_day("end") or datetime.now(UTC).date()
    start = _asked_day("start") or end - timedelta(days=_DAYS - 1)
    if not 0 <= (end - start).days < _MAX_DAYS:
        raise InvalidRequest(f"start must be at most {_MAX_DAYS} days before end, and not after it", param="start")
    form = request.args.get("format", "json")
    if form not in _FORMATS:
        raise InvalidRequest(f"format must be one of {', '.join(_FORMATS)}", param="format")
    with services().database.autocommit() as session:
        found = [_shown(each) for each in usage.usage(session, tenant().id, start, end)]
    if form == "csv":
        return Response(_csv(found), mimetype="text/csv")
    return jsonify(object="list", start=start.isoformat(), end=end.isoformat(), data=found)


_FIELDS = ("day", "model", "tier", "jobs", "prompt_tokens", "completion_tokens", "total_tokens")


def _shown(each: Usage) -> dict[str, Any]:
    values = {name: getattr(each, name) for name in _FIELDS}
    return values | {"day": each.day.isoformat()}


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    """A header line, then a line for each row, as RFC 4180 has it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _FIELDS)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _asked_day(name: str) -> date | None:
    value = request.args.get(name)
    if value is None:
        return None
    try:
        if not re.fullmatch(r"2[0-9]{3}-[0-9]{2}-[0-9]{2}", value):
            raise ValueError
        return date.fromisoformat(value)
    except ValueError:
        raise InvalidRequest(f"{name} must be a day such as 2026-01-31", param=name) from None
