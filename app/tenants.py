"""Tenants and their API keys."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app import tables
from app.errors import Forbidden, NotFound, Unauthenticated
from app.ids import new_id
from app.signatures import new_secret
from app.tables import ApiKey, Tenant
from app.tiers import Plan
from app.vault import Vault

_PREFIX_LENGTH = 15
"""Of 'eb_' and 12 hexadecimal digits: public, and enough to find the key by."""


class Scope(StrEnum):
    """What a key opens."""

    JOBS = "jobs"
    """All that its tenant has."""
    ADMIN = "admin"
    """What operators see of all tenants, and nothing else."""


@dataclass(frozen=True, slots=True)
class Provisioned:
    """What is shown once, when a key is made."""

    tenant_id: str
    key: str
    webhook_secret: str


def provision(
    session: Session,
    vault: Vault,
    *,
    name: str,
    plan: Plan,
    webhook_secret: str | None = None,
    scope: Scope = Scope.JOBS,
) -> Provisioned:
    """Make a key for the tenant of that name; a tenant that is new gets the given webhook secret, or a fresh one."""
    tenant = session.scalar(select(Tenant).where(Tenant.name == name))
    if tenant is None:
        secret = webhook_secret or new_secret()
        tenant = Tenant(id=new_id("tenant"), name=name, plan=plan.value, webhook_secret=vault.encrypt(secret))
        session.add(tenant)
        session.flush()
    key = f"eb_{secrets.token_hex(6)}_{secrets.token_urlsafe(32)}"
    session.add(
        ApiKey(id=new_id("key"), tenant_id=tenant.id, prefix=key[:_PREFIX_LENGTH], hash=_hash(key), scope=scope.value)
    )
    session.flush()
    return Provisioned(tenant_id=tenant.id, key=key, webhook_secret=vault.decrypt(tenant.webhook_secret))


def authenticate(session: Session, key: str, *, scope: Scope = Scope.JOBS) -> Tenant:
    """The tenant whose key this is. Raises Unauthenticated, and Forbidden for a key of another scope."""
    row = session.execute(
        select(ApiKey.hash, Tenant, ApiKey.scope)
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .where(ApiKey.prefix == key[:_PREFIX_LENGTH], ApiKey.revoked_at.is_(None))
    ).first()
    known = bytes(row[0]) if row is not None else bytes(32)
    if not hmac.compare_digest(known, _hash(key)) or row is None:
        raise Unauthenticated
    if row[2] != scope:
        raise Forbidden(f"This API key has the scope '{row[2]}'; '{scope}' is needed here")
    tenant: Tenant = row[1]
    return tenant


def keys(session: Session) -> Sequence[tuple[ApiKey, Tenant]]:
    """All keys with their tenants, oldest first; a revoked one has its revoked_at."""
    rows = session.execute(select(ApiKey, Tenant).join(Tenant, Tenant.id == ApiKey.tenant_id).order_by(ApiKey.id))
    return [(key, tenant) for key, tenant in rows]


def tenants(session: Session) -> Sequence[Tenant]:
    """All tenants, oldest first."""
    return session.scalars(select(Tenant).order_by(Tenant.id)).all()


def set_limits(
    session: Session,
    name: str,
    *,
    weight: float | None = None,
    tokens_per_day: int | None = None,
    requests_per_minute: int | None = None,
) -> Tenant:
    """Change what a tenant may use; None leaves a limit as it is, and 0 lifts it. Raises NotFound."""
    tenant = session.scalar(select(Tenant).where(Tenant.name == name).with_for_update())
    if tenant is None:
        raise NotFound(f"There is no tenant '{name}'")
    if weight is not None:
        tenant.weight = weight
    if tokens_per_day is not None:
        tenant.tokens_per_day = tokens_per_day or None
    if requests_per_minute is not None:
        tenant.requests_per_minute = requests_per_minute or None
    session.flush()
    return tenant


def revoke(session: Session, prefix: str) -> None:
    """End a key at once. Raises NotFound."""
    revoked = session.execute(
        update(ApiKey)
        .where(ApiKey.prefix == prefix, ApiKey.revoked_at.is_(None))
        .values(revoked_at=tables.NOW)
        .returning(ApiKey.id)
    )
    if revoked.first() is None:
        raise NotFound(f"There is no live key with the prefix '{prefix}'")


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
