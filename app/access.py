"""How to reach the service of a home: its address, a paid and a free key, the secret that signs webhooks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from app.errors import SetupError
from app.home import Home, write_private


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


def keep(home: Home, access: Access) -> None:
    """Write the home's file, for this user's eyes only."""
    write_private(home.keys, json.dumps(asdict(access), indent=2) + "\n")
