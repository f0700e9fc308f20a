from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import Result

from app.client import Client, Refused
from app.supervisor import Ready

Everbatch = Callable[..., Result]


def test_key_opens_the_service_until_it_is_revoked(everbatch: Everbatch, service: Ready) -> None:
    made = json.loads(everbatch("keys", "create", "alice", "--plan", "free", "--json").stdout)
    prefix = made["key"][:15]
    with Client(service.access.url, made["key"]) as alice:
        job = alice.submit("x", max_tokens=1)
        assert job["tier"] == "free"
        revoked = everbatch("keys", "revoke", prefix)
        assert (revoked.exit_code, revoked.stdout) == (0, f"{prefix} revoked\n")
        with pytest.raises(Refused) as refused:
            alice.get(job["id"])
        assert refused.value.status == 401
    rows = {row["prefix"]: row for row in map(json.loads, everbatch("keys", "list", "--json").stdout.splitlines())}
    assert (rows[prefix]["tenant"], rows[prefix]["plan"]) == ("alice", "free")
    assert rows[prefix]["revoked_at"] is not None
    assert rows[service.access.paid_key[:15]]["revoked_at"] is None


def test_a_key_for_operators_opens_what_they_see(everbatch: Everbatch, service: Ready) -> None:
    made = json.loads(everbatch("keys", "create", "ops", "--plan", "paid", "--scope", "admin", "--json").stdout)
    asked = httpx.get(
        f"{service.access.url}/v1/admin/shares", headers={"Authorization": f"Bearer {made['key']}"}, trust_env=False
    )
    assert (asked.status_code, asked.json()["object"]) == (200, "shares")
    rows = {row["prefix"]: row for row in map(json.loads, everbatch("keys", "list", "--json").stdout.splitlines())}
    assert (rows[made["key"][:15]]["scope"], rows[service.access.paid_key[:15]]["scope"]) == ("admin", "jobs")


def test_no_secret_is_listed(everbatch: Everbatch, service: Ready) -> None:
    for options in ((), ("--json",)):
        listed = everbatch("keys", "list", *options).stdout
        assert service.access.paid_key[:15] in listed
        assert service.access.paid_key not in listed and "whsec_" not in listed


def test_tenant_keeps_his_plan(everbatch: Everbatch) -> None:
    assert everbatch("keys", "create", "carol", "--plan", "paid").exit_code == 0
    refused = everbatch("keys", "create", "carol", "--plan", "free")
    assert refused.exit_code == 2
    assert "'carol' has the plan paid" in refused.stderr


def test_unknown_prefix_is_named(everbatch: Everbatch) -> None:
    refused = everbatch("keys", "revoke", "eb_nope")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "'eb_nope'" in refused.stderr


def test_home_without_a_service_is_named_in_one_line(everbatch: Everbatch, tmp_path: Path) -> None:
    refused = everbatch("keys", "list", "--home", str(tmp_path))
    assert refused.exit_code == 1
    (line,) = refused.stderr.splitlines()
    assert str(tmp_path) in line and "everbatch up" in line


def test_database_that_does_not_answer_is_told_in_one_line(everbatch: Everbatch) -> None:
    url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    refused = everbatch("keys", "list", EVERBATCH_DATABASE_URL=url)
    assert refused.exit_code == 1
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\tb", "\udcff", "x" * 101])
def test_a_name_that_no_list_can_show_is_refused(everbatch: Everbatch, name: str) -> None:
    refused = everbatch("keys", "create", name, "--plan", "paid")
    assert refused.exit_code == 2 and "NAME" in refused.stderr
