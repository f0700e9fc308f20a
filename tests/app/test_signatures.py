"""How webhooks are signed."""

from __future__ import annotations

import time

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from app import signatures


def test_the_standard_library_of_webhooks_accepts_the_signature() -> None:
    secret, body = signatures.new_secret(), '{"type":"job.succeeded"}'
    headers = signatures.sign([secret], "evt_1", int(time.time()), body)
    assert Webhook(secret).verify(body, headers) == {"type": "job.succeeded"}
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(body + " ", headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(body, headers | {"webhook-id": "evt_2"})
    with pytest.raises(WebhookVerificationError):
        Webhook(signatures.new_secret()).verify(body, headers)
