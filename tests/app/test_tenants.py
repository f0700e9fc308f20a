"""Tenants, their keys and their secrets."""

from __future__ import annotations

import base64
from collections.abc import Callable

import pytest
from sqlalchemy import select

from app import signatures, tenants
from app.db import Database
from app.errors import NotFound, Unauthenticated
from app.ids import new_id
from app.settings import Settings
from app.tables import ApiKey, Tenant
from app.tenants import Provisioned
from app.tiers import Plan
from app.vault import Vault


@pytest.fixture
def vault(settings: Settings) -> Vault:
    return Vault.open(settings)


def provision(db: Database, vault: Vault, name: str, plan: Plan = Plan.PAID) -> Provisioned:
    with db.transaction() as session:
        return tenants.provision(session, vault, name=name, plan=plan)


def tenant_of(db: Database, key: str) -> str:
    with db.transaction() as session:
        return tenants.authenticate(session, key).id


def test_a_key_opens_its_own_tenant(db: Database, vault: Vault) -> None:
    made = [provision(db, vault, new_id("name")) for _ in range(2)]
    assert [tenant_of(db, each.key) for each in made] == [each.tenant_id for each in made]


def test_two_keys_of_a_tenant_share_plan_and_secret(db: Database, vault: Vault) -> None:
    name = new_id("name")
    first, second = provision(db, vault, name), provision(db, vault, name)
    assert first.key != second.key
    assert (first.tenant_id, first.webhook_secret) == (second.tenant_id, second.webhook_secret)


@pytest.mark.parametrize("change", [lambda key: key[:-1], lambda key: key + "x", lambda key: key[:-1] + "!", str.upper])
def test_a_key_that_is_almost_right_is_refused(db: Database, vault: Vault, change: Callable[[str], str]) -> None:
    made = provision(db, vault, new_id("name"))
    with pytest.raises(Unauthenticated):
        tenant_of(db, change(made.key))


@pytest.mark.parametrize("key", ["", "x", "eb_", "eb_000000000000_", "eb_%_"])
def test_a_key_of_nobody_is_refused(db: Database, key: str) -> None:
    with pytest.raises(Unauthenticated):
        tenant_of(db, key)


def test_a_revoked_key_opens_nothing_and_the_tenants_other_key_still_does(db: Database, vault: Vault) -> None:
    name = new_id("name")
    first, second = provision(db, vault, name), provision(db, vault, name)
    with db.transaction() as session:
        tenants.revoke(session, first.key[:15])
    with pytest.raises(Unauthenticated):
        tenant_of(db, first.key)
    assert tenant_of(db, second.key) == second.tenant_id
    with pytest.raises(NotFound), db.transaction() as session:
        tenants.revoke(session, first.key[:15])


def test_neither_keys_nor_secrets_lie_in_the_database(db: Database, vault: Vault) -> None:
    made = provision(db, vault, new_id("name"))
    with db.transaction() as session:
        key = session.scalars(select(ApiKey).where(ApiKey.tenant_id == made.tenant_id)).one()
        tenant = session.get_one(Tenant, made.tenant_id)
    secret_part = made.key[16:]
    kept = b"".join([key.prefix.encode(), bytes(key.hash), bytes(tenant.webhook_secret)])
    assert secret_part.encode() not in kept
    assert made.webhook_secret.encode() not in kept
    assert vault.decrypt(bytes(tenant.webhook_secret)) == made.webhook_secret


def test_a_webhook_secret_is_32_random_bytes() -> None:
    secret = signatures.new_secret()
    assert secret.startswith("whsec_")
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    assert secret != signatures.new_secret()
