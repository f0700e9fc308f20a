"""How to reach the service of a home: its address, a paid and a free key, the secret that signs webhooks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace

from sqlalchemy.orm import Session

from app import tenants
from app.errors import SetupError, Unauthenticated
from app.home import Home, write_private
from app.tiers import Plan
from app.vault import Vault


@dataclass(frozen=True, slots=True)
class Access:
    url: str
    paid_key: str
    free_key: str
    webhook_secret: str
    """Of both tenants: whsec_…"""


def read(home: Home) -> Access:
    """What the home's file says. Raises SetupError when nothing usable is there."""
    try:
        kept = json.loads(home.keys.read_text())
        return Access(**{field.name: str(kept[field.name]) for field in fields(Access)})
    except (OSError, ValueError, KeyError, TypeError):
        raise SetupError(f"{home.keys} holds no keys: `everbatch up --home {home.path}` makes them") from None


def grant(session: Session, vault: Vault, home: Home, *, url: str) -> Access:
    """The access of the last start where its keys still open this database, else a new one; kept in the home's file.

    Write it down only after the transaction stands: see `keep`.
    """
    try:
        access = replace(read(home), url=url)
        tenants.authenticate(session, access.paid_key)
        tenants.authenticate(session, access.free_key)
    except (SetupError, Unauthenticated):
        paid = tenants.provision(session, vault, name="paid", plan=Plan.PAID)
        free = tenants.provision(session, vault, name="free", plan=Plan.FREE, webhook_secret=paid.webhook_secret)
        return Access(url, paid.key, free.key, paid.webhook_secret)
    return access


def keep(home: Home, access: Access) -> None:
    """Write the home's file, for this user's eyes only."""
    write_private(home.keys, json.dumps(asdict(access), indent=2) + "\n")
