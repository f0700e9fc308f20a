"""Signatures of webhooks, by Standard Webhooks 1.0.0."""

from __future__ import annotations

import base64
import hashlib
import hmac


def sign(secret: str, delivery_id: str, timestamp: int, body: str) -> dict[str, str]:
    """The headers of an attempt, by which the receiver proves it.

    secret     whsec_<base64>
    timestamp  of this attempt, Unix seconds
    Source: Standard Webhooks 1.0.0, symmetric signature v1.
    """
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.digest(key, f"{delivery_id}.{timestamp}.{body}".encode(), hashlib.sha256)
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
