from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from app.children import free_port
from app.supervisor import Ready

Everbatch = Callable[..., Result]


def test_options_go_before_the_environment_and_that_before_the_home(everbatch: Everbatch, service: Ready) -> None:
    access = service.access
    closed = f"http://127.0.0.1:{free_port()}"
    submit = ("submit", "x", "--max-tokens", "1", "--json")
    assert '"tier": "paid"' in everbatch(*submit).stdout
    assert '"tier": "free"' in everbatch(*submit, EVERBATCH_API_KEY=access.free_key).stdout
    assert '"tier": "paid"' in everbatch(*submit, "--key", access.paid_key, EVERBATCH_API_KEY=access.free_key).stdout
    assert closed in everbatch(*submit, EVERBATCH_URL=closed, EVERBATCH_API_KEY="eb_x").stderr
    assert '"tier"' in everbatch(*submit, "--url", f"{access.url}/", EVERBATCH_URL=closed).stdout


def test_key_of_the_home_is_sent_to_its_own_service_only(everbatch: Everbatch) -> None:
    refused = everbatch("submit", "x", "--url", "http://127.0.0.1:1")
    assert refused.exit_code == 2
    assert "--key" in refused.stderr


def test_service_that_does_not_answer_is_named_with_the_way_to_start_one(everbatch: Everbatch) -> None:
    refused = everbatch("submit", "x", "--url", "http://127.0.0.1:1", "--key", "eb_x")
    assert refused.exit_code == 1
    (line,) = refused.stderr.splitlines()
    assert "http://127.0.0.1:1" in line and "everbatch up" in line


def test_wrong_key_is_told_in_one_line(everbatch: Everbatch) -> None:
    refused = everbatch("submit", "x", "--key", "eb_wrong")
    assert refused.exit_code == 2
    assert len(refused.stderr.splitlines()) == 1


def test_home_without_keys_is_named(everbatch: Everbatch, tmp_path: Path) -> None:
    refused = everbatch("submit", "x", "--home", str(tmp_path))
    assert refused.exit_code == 1
    assert str(tmp_path) in refused.stderr


@pytest.mark.parametrize("job_id", ["", "..", "../models/echo", "a/b", "\udcff", "x" * 5000])
def test_what_cannot_be_an_id_never_becomes_an_address(everbatch: Everbatch, job_id: str) -> None:
    for command in (("watch", job_id), ("cancel", job_id), ("batch", "fetch", job_id)):
        refused = everbatch(*command)
        assert refused.exit_code == 2 and "is no id" in refused.stderr


def test_a_key_that_no_key_can_be_is_named(everbatch: Everbatch) -> None:
    refused = everbatch("submit", "x", "--key", "b\u00e9d")
    assert refused.exit_code == 2 and "--key" in refused.stderr
