"""Request bodies."""

from __future__ import annotations

from typing import Any

from flask import request

from app.api.services import services
from app.bodies import parse_object


def read_object() -> dict[str, Any]:
    """The JSON object in the request's body, whatever its content type says.

    Raises PayloadTooLarge, MalformedBody, InvalidRequest.
    """
    max_bytes = services().settings.max_body_bytes
    # One more than we take: Werkzeug cuts a body of unknown length off at its maximum, without a word.
    request.max_content_length = max_bytes + 1
    return parse_object(request.get_data(cache=False), max_bytes=max_bytes)
