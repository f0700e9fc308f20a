"""Webhook endpoints as their tenants keep them: made, changed, their secrets rotated.

A secret is shown when it is made and never again; at rest it is encrypted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from pydantic import Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app import db, deliveries, receivers, submissions
from app.addresses import check_url
from app.bodies import Body
from app.errors import InvalidRequest, NotFound, QueueFull
from app.ids import new_id
from app.notices import EVENT_TYPES, FAMILIES
from app.settings import Settings
from app.signatures import OLD_SECRET_S, hint, new_secret
from app.tables import Endpoint, Tenant
from app.vault import Vault

MAX_ENDPOINTS = 20
"""Of one tenant: each end of a job writes a delivery for every one that wants it."""

Name = Annotated[str, Field(min_length=1, max_length=256)]
EventTypes = Annotated[list[str], Field(min_length=1, max_length=64)]


class Creation(Body):
    """The body of POST /v1/webhook_endpoints."""

    name: Name
    url: str
    event_types: EventTypes
    enabled: bool = True


class Change(Body):
    """The body of POST /v1/webhook_endpoints/{id}; what is left out stays."""

    name: Name | None = None
    url: str | None = None
    event_types: EventTypes | None = None
    enabled: bool | None = None


class Rotation(Body):
    """The body of POST /v1/webhook_endpoints/{id}/rotate_secret."""

    keep_old_secret_active_for_24_hours: bool = False


@dataclass(frozen=True, slots=True)
class Secret:
    """An endpoint, and the secret that is shown this once."""

    endpoint: Endpoint
    secret: str


def create(session: Session, vault: Vault, settings: Settings, tenant_id: str, body: Mapping[str, object]) -> Secret:
    """Make an endpoint of what a client asks for. Raises InvalidRequest, and QueueFull at MAX_ENDPOINTS."""
    asked = submissions.validated(Creation, body)
    check_url(asked.url, settings, param="url")
    # The tenant's row is locked, so that two requests at once do not both take the last place.
    session.execute(select(Tenant.id).where(Tenant.id == tenant_id).with_for_update(key_share=True))
    if (session.scalar(select(func.count()).where(Endpoint.tenant_id == tenant_id)) or 0) >= MAX_ENDPOINTS:
        raise QueueFull(f"A tenant has at most {MAX_ENDPOINTS} webhook endpoints: delete one", retry_after_s=60)
    secret, moment = new_secret(), db.now(session)
    endpoint = Endpoint(
        id=new_id("endpoint"),
        tenant_id=tenant_id,
        name=asked.name,
        url=asked.url,
        event_types=known_types(asked.event_types),
        enabled=asked.enabled,
        secret=vault.encrypt(secret),
        secret_hint=hint(secret),
        created_at=moment,
        updated_at=moment,
    )
    session.add(endpoint)
    session.flush()
    return Secret(endpoint, secret)


def known_types(asked: Collection[str]) -> list[str]:
    """The event types, each once. Raises InvalidRequest for one that is never told."""
    for event_type in asked:
        if event_type not in EVENT_TYPES and event_type not in FAMILIES:
            known = ", ".join((*FAMILIES, *EVENT_TYPES))
            raise InvalidRequest(f"event_types may hold {known}; not '{event_type[:64]}'", param="event_types")
    return list(dict.fromkeys(asked))


def find(session: Session, tenant_id: str, endpoint_id: str, *, for_update: bool = False) -> Endpoint:
    """The tenant's endpoint. Raises NotFound; somebody else's looks the same as none."""
    query = select(Endpoint).where(Endpoint.id == endpoint_id, Endpoint.tenant_id == tenant_id)
    endpoint = session.scalar(query.with_for_update() if for_update else query)
    if endpoint is None:
        raise NotFound(f"There is no webhook endpoint '{endpoint_id}'", param="id")
    return endpoint


def page(session: Session, tenant_id: str, *, after: str | None, limit: int) -> list[Endpoint]:
    """The tenant's endpoints, newest first, from behind the endpoint id after, at most limit of them."""
    query = select(Endpoint).where(Endpoint.tenant_id == tenant_id)
    if after is not None:
        query = query.where(Endpoint.id < after)
    return list(session.scalars(query.order_by(Endpoint.id.desc()).limit(limit)))


def change(
    session: Session, settings: Settings, tenant_id: str, endpoint_id: str, body: Mapping[str, object]
) -> Endpoint:
    """Change what the body names. Disabling it ends its deliveries that wait; they may be asked for again.

    Raises InvalidRequest and NotFound.
    """
    asked = submissions.validated(Change, body).model_dump(exclude_none=True)
    if "url" in asked:
        check_url(asked["url"], settings, param="url")
    if "event_types" in asked:
        asked["event_types"] = known_types(asked["event_types"])
    endpoint = find(session, tenant_id, endpoint_id, for_update=True)
    changed = {name: value for name, value in asked.items() if getattr(endpoint, name) != value}
    for name, value in changed.items():
        setattr(endpoint, name, value)
    if changed:
        endpoint.updated_at = db.now(session)
    if "enabled" in changed:
        endpoint.disabled_reason = None
        if not endpoint.enabled:
            deliveries.give_up(session, endpoint.id, deliveries.DISABLED)
    if changed.keys() & {"enabled", "url"}:
        receivers.forgive(session, tenant_id, endpoint.id)
    session.flush()
    return endpoint


def remove(session: Session, tenant_id: str, endpoint_id: str) -> None:
    """Delete an endpoint; its deliveries that wait end with it. Raises NotFound."""
    endpoint = find(session, tenant_id, endpoint_id, for_update=True)
    deliveries.give_up(session, endpoint.id, deliveries.GONE)
    receivers.forgive(session, tenant_id, endpoint.id)
    session.delete(endpoint)
    session.flush()


def rotate(session: Session, vault: Vault, tenant_id: str, endpoint_id: str, body: Mapping[str, object]) -> Secret:
    """Give an endpoint a new secret; the old one signs beside it for a day, if that is asked for.

    Raises InvalidRequest and NotFound.
    """
    asked = submissions.validated(Rotation, body)
    endpoint = find(session, tenant_id, endpoint_id, for_update=True)
    secret, moment = new_secret(), db.now(session)
    endpoint.old_secret, endpoint.old_secret_until = _kept(endpoint.secret, moment, asked)
    endpoint.secret, endpoint.secret_hint, endpoint.updated_at = vault.encrypt(secret), hint(secret), moment
    session.flush()
    return Secret(endpoint, secret)


def rotate_own(session: Session, vault: Vault, tenant_id: str, body: Mapping[str, object]) -> str:
    """The same for the tenant's own secret, which signs the webhooks that jobs and batches name; the new one.

    Raises InvalidRequest.
    """
    asked = submissions.validated(Rotation, body)
    tenant = session.get_one(Tenant, tenant_id, with_for_update={"key_share": True}, populate_existing=True)
    secret = new_secret()
    kept = _kept(tenant.webhook_secret, db.now(session), asked)
    tenant.old_webhook_secret, tenant.old_webhook_secret_until = kept
    tenant.webhook_secret = vault.encrypt(secret)
    session.flush()
    return secret


def _kept(secret: bytes, moment: datetime, asked: Rotation) -> tuple[bytes | None, datetime | None]:
    """The old secret and until when it signs; nothing where it ends at once."""
    if not asked.keep_old_secret_active_for_24_hours:
        return None, None
    return secret, moment + timedelta(seconds=OLD_SECRET_S)
