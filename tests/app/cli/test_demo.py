from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import standardwebhooks
from click.testing import CliRunner

from app.cli import main
from app.cli.demo.narrator import Failed, Narrator
from app.cli.demo.receiver import Received, receiver
from app.signatures import new_secret


def test_claim_that_does_not_hold_ends_the_story() -> None:
    with pytest.raises(Failed, match="does not hold: Two and two are five"):
        Narrator(to_stderr=True).claim("Two and two are five.", holds=False)


def _signed(secret: str, body: bytes) -> dict[str, str]:
    moment = datetime.now(UTC)
    return {
        "webhook-id": "evt_1",
        "webhook-timestamp": str(int(moment.timestamp())),
        "webhook-signature": standardwebhooks.Webhook(secret).sign("evt_1", moment, body.decode()),
    }


def test_receiver_believes_the_signature_alone() -> None:
    secret = new_secret()
    body = b'{"type":"job.succeeded"}'
    with receiver() as webhooks:
        answer = httpx.post(webhooks.url, content=body, headers=_signed(secret, body), trust_env=False)
        received = webhooks.inbox.get(timeout=10)
    assert answer.status_code == 204
    assert received.verified(secret) == {"type": "job.succeeded"}
    assert received.verified(new_secret()) is None
    assert received.with_body(body.replace(b"succeeded", b"failed")).verified(secret) is None
    assert Received({}, body).verified(secret) is None


@pytest.mark.slow
def test_service_that_cannot_start_ends_the_demo_with_one_sentence(make_home: Callable[[], Path]) -> None:
    home = make_home()
    result = CliRunner().invoke(main, ["demo", "--model", "/no/such/model"], env={"EVERBATCH_HOME": str(home)})
    assert result.exit_code == 1
    assert "/no/such/model" in result.stderr.splitlines()[-1]
    assert not list(home.glob("demo-*"))


@pytest.mark.slow
def test_every_claim_holds_with_the_echo_engine(make_home: Callable[[], Path]) -> None:
    home = make_home()
    result = CliRunner().invoke(main, ["demo", "--model", "echo", "--json"], env={"EVERBATCH_HOME": str(home)})
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["Jobs"] == "35 submitted, 35 succeeded, 0 lost"
    assert sorted(entry.name for entry in home.iterdir()) == ["logs", "models"]
