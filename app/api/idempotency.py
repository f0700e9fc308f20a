"""Idempotency-Key: what a client sends to have the same thing made once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flask import request

from app.bodies import fingerprint
from app.errors import InvalidRequest
from app.jobs import Idempotency

_KEY = re.compile(r'"[ -!#-~]{1,255}"|[!#-~][ -~]{0,254}')
"""A structured field's string, or bare as older clients send it."""


def idempotency_of(body: Mapping[str, Any], *, endpoint: str | None = None) -> Idempotency | None:
    """The key of the current request, with its body; None where it has none. Raises InvalidRequest.

    endpoint is told where the same body means another thing elsewhere.
    """
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise InvalidRequest("Idempotency-Key must be 1 to 255 printable ASCII characters", param="Idempotency-Key")
    asked = dict(body) if endpoint is None else {"endpoint": endpoint, "body": body}
    return Idempotency(key[1:-1] if key.startswith('"') else key, fingerprint(asked))
