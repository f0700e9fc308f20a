"""Where webhooks may go."""

from __future__ import annotations

import ipaddress

import pytest

from app.addresses import check_url, is_public
from app.errors import InvalidRequest
from app.settings import Settings

STRICT = Settings()
OPEN = Settings(webhook_allow_private=True)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/hook",
        "https://example.com:443/",
        "https://hooks.example.com:8443/a?b=c",
        "https://example.com.",
        "https://xn--bcher-kva.example/",
        "https://93.184.216.34/",
        "https://[2606:2800:220:1:248:1893:25c8:1946]/",
        "https://[::ffff:93.184.216.34]/",
        "https://10.example.com/",
    ],
)
def test_public_urls_are_taken(url: str) -> None:
    assert check_url(url, STRICT) == url


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",  # not encrypted
        "ftp://example.com/",
        "//example.com/",
        "example.com",
        "https://",
        "https:///path",
        "https://example.com:22/",  # another service's port
        "https://example.com:80/",
        "https://example.com:99999/",
        "https://user:pass@example.com/",  # credentials, and a way to hide the host
        "https://example.com@127.0.0.1/",
        "https://example.com\\@127.0.0.1/",
        "https://exa mple.com/",
        "https://example.com/\nHost: inside",
        "https://exämple.com/",
        "https://localhost/",  # names that are inside
        "https://db/",
        "https://db.localhost/",
        "https://printer.local/",
        "https://metadata.google.internal/",
        "https://.com/",
        "https://" + "a" * 64 + ".com/",
        "https://127.0.0.1/",  # addresses that are inside
        "https://127.0.0.1./",
        "https://10.0.0.8/",
        "https://172.16.0.1/",
        "https://192.168.1.1/",
        "https://169.254.169.254/latest/meta-data/",
        "https://100.64.0.1/",
        "https://0.0.0.0/",
        "https://224.0.0.1/",
        "https://255.255.255.255/",
        "https://192.88.99.1/",
        "https://2130706433/",  # 127.0.0.1 in the forms that resolvers take
        "https://0x7f000001/",
        "https://0x7f.1/",
        "https://0177.0.0.1/",
        "https://127.1/",
        "https://0/",
        "https://134744072/",  # 8.8.8.8: public, but nobody writes it like this
        "https://[::1]/",
        "https://[::]/",
        "https://[::127.0.0.1]/",  # IPv4-compatible
        "https://[::ffff:127.0.0.1]/",  # IPv4-mapped
        "https://[::ffff:7f00:1]/",
        "https://[64:ff9b::7f00:1]/",  # NAT64
        "https://[64:ff9b:1::7f00:1]/",
        "https://[2002:7f00:1::]/",  # 6to4
        "https://[2001:0:7f00:1::]/",  # Teredo
        "https://[fe80::1]/",
        "https://[fe80::1%25eth0]/",
        "https://[fec0::1]/",
        "https://[fc00::1]/",
        "https://[fd00:ec2::254]/",
        "https://[ff02::1]/",
        "https://[2001:db8::1]/",
        "https://[::1/",
        "https://" + "a" * 2_100 + ".com/",
        "",
    ],
)
def test_urls_that_are_not_public_are_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_url(url, STRICT)
    assert refusal.value.param == "webhook.url"
    assert refusal.value.message.startswith("webhook.url ")


@pytest.mark.parametrize("url", ["http://127.0.0.1:5000/hook", "http://receiver:9/", "https://[::1]:8443/"])
def test_the_operator_may_allow_private_receivers(url: str) -> None:
    assert check_url(url, OPEN) == url


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/", "http://a:b@127.0.0.1/", "http:///x", "http://127.0.0.1:0x50/"])
def test_even_private_receivers_need_a_plain_url(url: str) -> None:
    with pytest.raises(InvalidRequest):
        check_url(url, OPEN)


def test_is_public_is_stricter_than_ipaddress() -> None:
    for text in ("224.0.0.1", "192.88.99.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::7f00:1"):
        assert not is_public(ipaddress.ip_address(text)), text
    for text in ("8.8.8.8", "2606:4700::1111"):
        assert is_public(ipaddress.ip_address(text)), text
