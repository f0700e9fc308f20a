from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result

Everbatch = Callable[..., Result]


def test_limits_are_set_one_by_one_shown_and_lifted(everbatch: Everbatch) -> None:
    assert everbatch("keys", "create", "dora", "--plan", "free").exit_code == 0
    everbatch("tenants", "set", "dora", "--weight", "2.5", "--tokens-per-day", "1000")
    changed = everbatch("tenants", "set", "dora", "--requests-per-minute", "60", "--json")
    expected = {"name": "dora", "plan": "free", "weight": 2.5, "tokens_per_day": 1000, "requests_per_minute": 60}
    assert json.loads(changed.stdout) == expected
    listed = [json.loads(line) for line in everbatch("tenants", "list", "--json").stdout.splitlines()]
    assert expected in listed
    lifted = everbatch("tenants", "set", "dora", "--tokens-per-day", "0", "--requests-per-minute", "0")
    assert lifted.stdout == "free  weight 2.5  no quota  no rate limit  dora\n"


@pytest.mark.parametrize("options", [("--weight", "0"), ("--tokens-per-day", "-1"), ("--requests-per-minute", "x")])
def test_a_wrong_limit_is_named(everbatch: Everbatch, options: tuple[str, str]) -> None:
    refused = everbatch("tenants", "set", "paid", *options)
    assert refused.exit_code == 2 and options[0] in refused.stderr


def test_an_unknown_tenant_is_named(everbatch: Everbatch) -> None:
    refused = everbatch("tenants", "set", "nobody-here", "--weight", "1")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "'nobody-here'" in refused.stderr
