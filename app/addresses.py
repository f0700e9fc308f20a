"""Which addresses webhooks may go to: https to public hosts, unless the operator allows more."""

from __future__ import annotations

import ipaddress
import re

from urllib3.exceptions import LocationParseError
from urllib3.util import Url, parse_url

from app.errors import InvalidRequest
from app.settings import Settings

_MAX_URL_LENGTH = 2_048
_PUBLIC_PORTS = (None, 443, 8443)
_INTERNAL_NAMES = ("localhost", "local", "internal", "home.arpa")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NOT_FOR_RECEIVERS = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.88.99.0/24",  # 6to4 relays
            "2001::/23",  # protocol assignments, Teredo among them, which wraps an IPv4 address
            "2002::/16",  # 6to4: wraps an IPv4 address
            "3fff::/20",  # documentation, unknown to older Pythons
        ),
    )
)
"""Networks that ipaddress takes for global, though no receiver lives there."""


def check_url(url: str, settings: Settings) -> str:
    """The URL, if webhooks may go there. Raises InvalidRequest, param webhook.url.

    https, port 443 or 8443, a public host. Names are resolved and their addresses checked at each attempt, not here.
    With settings.webhook_allow_private also http, any port and any host.
    """
    parsed = _parse(url)
    if parsed.auth is not None:
        raise _wrong("must not carry a user name or password")
    if settings.webhook_allow_private:
        if parsed.scheme not in ("http", "https"):
            raise _wrong("must begin with https:// or http://")
        return url
    if parsed.scheme != "https":
        raise _wrong("must begin with https://")
    if parsed.port not in _PUBLIC_PORTS:
        raise _wrong("must use port 443 or 8443")
    if not _may_be_public(parsed.host or ""):
        raise _wrong("must name a public host")
    return url


def _parse(url: str) -> Url:
    """By the parser that the sender uses, so that both see the same host."""
    if len(url) > _MAX_URL_LENGTH:
        raise _wrong(f"must not be longer than {_MAX_URL_LENGTH} characters")
    if not re.fullmatch(r"[!-\[\]-~]+", url):
        raise _wrong("must be printable ASCII without spaces and backslashes")
    try:
        parsed = parse_url(url)
    except LocationParseError as error:
        raise _wrong("is not a URL") from error
    if not parsed.host:
        raise _wrong("must name a host")
    return parsed


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(f"webhook.url {what}", param="webhook.url")


def _may_be_public(host: str) -> bool:
    """False for an address or a name that is inside; a name that passes is judged by its address when it is used."""
    if host.startswith("["):
        return _is_public_literal(host.strip("[]"))
    labels = host.rstrip(".").lower().split(".")
    if re.fullmatch(r"\d+|0x[0-9a-f]*", labels[-1]):
        # Resolvers read 2130706433, 0x7f.1 and 0177.0.0.1 as IPv4 addresses; only the plain form is taken.
        return _is_public_literal(host)
    is_internal = any(".".join(labels).endswith(f".{name}") for name in _INTERNAL_NAMES)
    return len(labels) > 1 and all(0 < len(label) < 64 for label in labels) and not is_internal


def _is_public_literal(text: str) -> bool:
    try:
        return is_public(ipaddress.ip_address(text))
    except ValueError:
        return False


def is_public(address: Address) -> bool:
    """Whether a receiver on the public internet can have this address.

    Stricter than ipaddress.is_global, which takes multicast, NAT64 and 6to4 forms of private addresses for global.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.scope_id is not None or address not in _GLOBAL_UNICAST:
            return False
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not any(address in network for network in _NOT_FOR_RECEIVERS)
    )
