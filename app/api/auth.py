"""Who asks: the tenant of the request's API key."""

from __future__ import annotations

import re

from flask import g, request

from app import tenants
from app.api.services import services
from app.errors import RateLimited, Unauthenticated
from app.limits import Rate
from app.tables import Tenant
from app.tenants import Scope

_BEARER = re.compile(r"bearer +([!-~]{1,200})", re.IGNORECASE)


def authenticate() -> None:
    """Before each request of a blueprint: find the tenant. Raises Unauthenticated, Forbidden and RateLimited."""
    _find(Scope.JOBS)
    if request.method == "POST" and g.tenant.requests_per_minute is not None:
        _count(g.tenant.id, g.tenant.requests_per_minute)


def authenticate_operator() -> None:
    """The same, where a key of the scope admin is needed; none of its requests is counted."""
    _find(Scope.ADMIN)


def _find(scope: Scope) -> None:
    bearer = _BEARER.fullmatch(request.headers.get("Authorization", "").strip())
    if bearer is None:
        raise Unauthenticated
    with services().database.autocommit() as session:
        g.tenant = tenants.authenticate(session, bearer[1], scope=scope)


def _count(tenant_id: str, per_minute: int) -> None:
    """Count a request that is to make or change something. Raises RateLimited."""
    g.rate = rate = services().rates.hit(tenant_id, per_minute)
    if rate.is_exceeded:
        raise RateLimited(f"At most {per_minute} POST requests a minute are allowed", retry_after_s=rate.reset_s)


def rate_headers() -> dict[str, str]:
    """Where the tenant stands, in the names that OpenAI's clients know; none where it has no limit."""
    rate: Rate | None = g.get("rate")
    if rate is None:
        return {}
    return {
        "x-ratelimit-limit-requests": str(rate.limit),
        "x-ratelimit-remaining-requests": str(rate.remaining),
        "x-ratelimit-reset-requests": f"{rate.reset_s}s",
    }


def tenant() -> Tenant:
    """The tenant of the current request."""
    found: Tenant = g.tenant
    return found
