"""Signatures of webhooks, by Standard Webhooks 1.0.0."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence

OLD_SECRET_S = 86_400
"""Seconds for which a secret that was rotated away goes on to sign beside the new one, where that is wanted."""


def new_secret() -> str:
    """A secret of 32 random bytes: whsec_<base64>."""
    return f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"


def hint(secret: str) -> str:
    """What may be shown of a secret later on: its last four characters."""
    return f"whsec_…{secret[-4:]}"


def sign(secrets: Sequence[str], delivery_id: str, timestamp: int, body: str) -> dict[str, str]:
    """The headers of an attempt, by which a receiver that knows one of the secrets proves it.

    secrets    whsec_<base64> each; while one replaces another, both sign
    timestamp  of this attempt, Unix seconds
    Source: Standard Webhooks 1.0.0, symmetric signature v1.
    """
    signed = f"{delivery_id}.{timestamp}.{body}".encode()
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(_signature(secret, signed) for secret in secrets),
    }


def _signature(secret: str, signed: bytes) -> str:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    return f"v1,{base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()}"
