"""Which addresses webhooks may go to: https to public hosts, unless the operator allows more."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from urllib3.exceptions import LocationParseError
from urllib3.util import parse_url

from app.errors import InvalidRequest
from app.settings import Settings

_MAX_URL_LENGTH = 2_048
_PORTS = {"https": 443, "http": 80}
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


def check_url(url: str, settings: Settings, *, param: str = "webhook.url") -> str:
    """The URL, if webhooks may go there. Raises InvalidRequest, which names the field.

    https, a port of settings.webhook_ports, a public host or one of settings.webhook_networks. Names are resolved and
    their addresses checked at each attempt, not here. With settings.webhook_allow_http also http; with
    settings.webhook_allow_private also http, any port and any host.
    """
    if (problem := _problem(url, settings)) is not None:
        raise InvalidRequest(f"{param} {problem}", param=param)
    return url


@dataclass(frozen=True, slots=True)
class Place:
    """Where a URL leads."""

    scheme: str
    host: str
    """A name, or an address without brackets."""
    port: int
    path: str
    """With the query."""

    @property
    def authority(self) -> str:
        """As a Host header has it: the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def place_of(url: str) -> Place:
    """Where a URL leads that check_url took: both read it by the same parser, and so see the same host."""
    parsed = parse_url(url)
    assert parsed.scheme in _PORTS and parsed.host
    host = parsed.host.strip("[]").lower()
    return Place(parsed.scheme, host, parsed.port or _PORTS[parsed.scheme], parsed.request_uri)


def origin_of(url: str) -> str:
    """Scheme, host and port of a URL that check_url took: https://example.com:443."""
    place = place_of(url)
    return f"{place.scheme}://{place.host}:{place.port}"


def may_receive(address: Address, settings: Settings) -> bool:
    """Whether webhooks may go to an address."""
    plain = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    is_listed = any((plain or address) in network for network in settings.webhook_networks)
    return settings.webhook_allow_private or is_listed or is_public(address)


def _problem(url: str, settings: Settings) -> str | None:
    """Why webhooks may not go there; None where they may."""
    if len(url) > _MAX_URL_LENGTH:
        return f"must not be longer than {_MAX_URL_LENGTH} characters"
    if not re.fullmatch(r"[!-\[\]-~]+", url):
        return "must be printable ASCII without spaces and backslashes"
    try:
        parsed = parse_url(url)
    except LocationParseError:
        return "is not a URL"
    if not parsed.host:
        return "must name a host"
    if parsed.auth is not None:
        return "must not carry a user name or password"
    if settings.webhook_allow_private:
        return None if parsed.scheme in _PORTS else "must begin with https:// or http://"
    if parsed.scheme != "https" and not (parsed.scheme == "http" and settings.webhook_allow_http):
        return "must begin with https://" + (" or http://" if settings.webhook_allow_http else "")
    if (parsed.port or _PORTS[parsed.scheme]) not in {*settings.webhook_ports, _PORTS[parsed.scheme]}:
        return f"must use port {' or '.join(map(str, settings.webhook_ports))}"
    return None if _may_be_taken(parsed.host, settings) else "must name a public host"


def _may_be_taken(host: str, settings: Settings) -> bool:
    """Whether a host may turn out to be a receiver. Where the operator lists networks, names inside may be in one."""
    if (literal := _literal(host)) is not None:
        return may_receive(literal, settings)
    return _may_be_public(host) or (bool(settings.webhook_networks) and not _is_number(host))


def _may_be_public(host: str) -> bool:
    """False for a name that is inside; one that passes is judged by its address when it is used."""
    labels = host.rstrip(".").lower().split(".")
    is_internal = any(".".join(labels).endswith(f".{name}") for name in _INTERNAL_NAMES)
    is_name = len(labels) > 1 and all(0 < len(label) < 64 for label in labels)
    return is_name and not is_internal and not _is_number(host)


def _is_number(host: str) -> bool:
    """Resolvers read 2130706433, 0x7f.1 and 0177.0.0.1 as IPv4 addresses; only the plain form is taken."""
    return re.fullmatch(r"\d+|0x[0-9a-f]*", host.rstrip(".").lower().split(".")[-1]) is not None


def _literal(host: str) -> Address | None:
    """The address that a host spells, if it is one."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


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
