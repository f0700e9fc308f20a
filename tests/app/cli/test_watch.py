from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result

from app.cli.watch import tell_end
from app.client import Client

Everbatch = Callable[..., Result]


def test_ended_job_is_shown_from_its_first_token(everbatch: Everbatch, client: Client) -> None:
    job = client.wait(client.submit("x", max_tokens=30)["id"])
    watched = everbatch("watch", job["id"])
    assert (watched.exit_code, watched.stdout) == (0, job["output"]["choices"][0]["text"] + "\n")
    assert json.loads(everbatch("watch", job["id"], "--json").stdout) == job


@pytest.mark.parametrize(("text", "ending"), [("a", "\n"), ("a\n", ""), ("", "")])
def test_last_line_of_a_text_is_ended_once(
    client: Client, capsys: pytest.CaptureFixture[str], text: str, ending: str
) -> None:
    job = client.wait(client.submit("x", max_tokens=1)["id"])
    job["output"]["choices"][0]["text"] = text
    tell_end(job)
    assert capsys.readouterr().out == ending


def test_exit_code_tells_how_the_job_ended(everbatch: Everbatch, client: Client) -> None:
    cancelled = client.submit("x", max_tokens=8000)["id"]
    client.cancel(cancelled)
    expired = client.submit("x", max_tokens=8000, deadline=0.2)["id"]
    assert everbatch("watch", cancelled).exit_code == 3
    watched = everbatch("watch", expired)
    assert watched.exit_code == 1
    assert "deadline" in watched.stderr


def test_unknown_job_is_named(everbatch: Everbatch) -> None:
    watched = everbatch("watch", "job_nope")
    assert (watched.exit_code, watched.stdout) == (2, "")
    assert "'job_nope'" in watched.stderr


def test_the_first_of_several_choices_is_shown_live_and_the_others_at_the_end(
    everbatch: Everbatch, client: Client
) -> None:
    job = client.wait(client.submit("x", max_tokens=30, n=3)["id"])
    first, second, third = (choice["text"] for choice in job["output"]["choices"])
    watched = everbatch("watch", job["id"])
    assert (watched.exit_code, watched.stdout) == (0, f"{first}\n{second}\n{third}\n")
    assert "choice 1" in watched.stderr and len({first, second, third}) == 3
