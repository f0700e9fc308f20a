"""Who asks: the tenant of the request's API key."""

from __future__ import annotations

import re

from flask import g, request

from app import tenants
from app.api.services import services
from app.errors import Unauthenticated
from app.tables import Tenant

_BEARER = re.compile(r"bearer +([!-~]{1,200})", re.IGNORECASE)


def authenticate() -> None:
    """Before each request of a blueprint: find the tenant, or raise Unauthenticated."""
    bearer = _BEARER.fullmatch(request.headers.get("Authorization", "").strip())
    if bearer is None:
        raise Unauthenticated
    with services().database.autocommit() as session:
        g.tenant = tenants.authenticate(session, bearer[1])


def tenant() -> Tenant:
    """The tenant of the current request."""
    found: Tenant = g.tenant
    return found
