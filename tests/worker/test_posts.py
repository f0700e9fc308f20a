"""A webhook goes to an address that was checked, and nowhere else, whatever a name or a receiver tries."""

from __future__ import annotations

import datetime
import gzip
import ipaddress
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from app import signatures
from app.deliveries import Outcome, Outgoing
from app.settings import Settings
from worker import posts
from worker.posts import post

SECRET = signatures.new_secret()
NOT_PUBLIC = Outcome(error="the host has an address that is not public")
NO_ANSWER = Outcome(error="there was no answer in time")
BODY = '{"a":1}'
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@dataclass
class Listener:
    """A TCP server that keeps what it reads, answers with fixed bytes, and counts who came."""

    address: str
    answer: bytes = OK
    accepted: int = 0
    got: list[bytes] = field(default_factory=list)
    port: int = 0
    tls: ssl.SSLContext | None = None

    def serve(self, server: socket.socket) -> None:
        while True:
            try:
                connected, _ = server.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                with connected if self.tls is None else self.tls.wrap_socket(connected, server_side=True) as talking:
                    self.got.append(_request(talking))
                    talking.sendall(self.answer)
            except OSError:
                continue


def _request(talking: socket.socket) -> bytes:
    """All of a request, or what came of it: to close with something unread would take the answer back."""
    received = b""
    while not received.endswith(BODY.encode()) and (piece := talking.recv(65_536)):
        received += piece
    return received


@contextmanager
def listening(address: str, port: int = 0, **options: Any) -> Iterator[Listener]:
    with socket.create_server((address, port)) as server:
        listener = Listener(address, port=server.getsockname()[1], **options)
        thread = threading.Thread(target=listener.serve, args=(server,), daemon=True)
        thread.start()
        yield listener
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


@pytest.fixture
def canary() -> Iterator[Listener]:
    """On loopback, where no webhook may come; the name that it listens on is that of every attempt here."""
    with listening("127.0.0.1") as listener:
        yield listener
    assert listener.accepted == 0
    assert listener.got == []


Resolve = Callable[..., list[str]]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Gives names addresses: each call of getaddrinfo the next of the answers. Returns who was asked for."""

    def answer(*answers: list[str]) -> list[str]:
        asked: list[str] = []

        def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
            asked.append(host)
            given = answers[min(len(asked), len(answers)) - 1]
            return [(socket.AF_INET6 if ":" in each else socket.AF_INET, 1, 6, "", (each, port)) for each in given]

        monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
        return asked

    return answer


def send(url: str, **values: Any) -> Outcome:
    return post(Outgoing(url=url, body=BODY, secrets=(SECRET,)), "evt_1", Settings(**values))


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["93.184.216.34", "127.0.0.1"],  # one of several
        ["127.0.0.1", "93.184.216.34"],
        ["169.254.169.254"],  # the cloud's own
        ["0.0.0.0"],
        ["10.0.0.1"],
        ["100.64.0.1"],
        ["224.0.0.1"],
        ["::1"],
        ["::"],
        ["::ffff:127.0.0.1"],
        ["::ffff:169.254.169.254"],
        ["64:ff9b::7f00:1"],  # NAT64 of 127.0.0.1
        ["2002:7f00:1::"],  # 6to4
        ["2001:0:7f00:1::"],  # Teredo
        ["fd00:ec2::254"],
        ["fe80::1%1"],
    ],
    ids=lambda addresses: "+".join(addresses),
)
def test_a_name_with_any_address_inside_gets_nothing(canary: Listener, resolver: Resolve, addresses: list[str]) -> None:
    asked = resolver(addresses)
    assert send(f"https://receiver.example:{canary.port}/", webhook_ports=(canary.port,)) == NOT_PUBLIC
    assert asked == ["receiver.example"]


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "0.0.0.0",
        "0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "localhost",
        "user:word@127.0.0.1",
        "receiver.example@127.0.0.1",
    ],
)
def test_no_spelling_of_loopback_is_even_resolved(canary: Listener, resolver: Resolve, host: str) -> None:
    asked = resolver(["127.0.0.1"])
    outcome = send(f"https://{host}:{canary.port}/", webhook_ports=(canary.port,))
    assert outcome.status is None
    assert asked == []


def test_a_name_that_changes_its_mind_gains_nothing(canary: Listener, resolver: Resolve) -> None:
    """The second answer would be loopback: within an attempt it is never asked for, at the next one it is refused."""
    asked = resolver(["127.0.0.2"], ["127.0.0.1"])
    with listening("127.0.0.2", canary.port) as receiver:
        url = f"http://receiver.example:{canary.port}/hook?a=b"
        allowed = {"webhook_networks": ("127.0.0.2/32",), "webhook_allow_http": True, "webhook_ports": (canary.port,)}
        assert send(url, **allowed) == Outcome(status=200)
        assert asked == ["receiver.example"]
        assert send(url, **allowed) == NOT_PUBLIC
    (request,) = receiver.got
    assert request.startswith(b"POST /hook?a=b HTTP/1.1\r\n")
    assert f"Host: receiver.example:{canary.port}\r\n".encode() in request


def test_the_next_checked_address_is_tried_when_one_takes_no_connection(resolver: Resolve) -> None:
    with listening("127.0.0.2") as receiver:
        resolver(["127.0.0.3", "127.0.0.2"])
        url = f"http://receiver.example:{receiver.port}/"
        allowed = {"webhook_networks": ("127.0.0.0/30",), "webhook_allow_http": True, "webhook_ports": (receiver.port,)}
        assert send(url, **allowed) == Outcome(status=200)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_leads_inside(canary: Listener, status: int) -> None:
    answer = f"HTTP/1.1 {status} x\r\nLocation: http://127.0.0.1:{canary.port}/\r\nContent-Length: 0\r\n\r\n".encode()
    with listening("127.0.0.2", answer=answer) as receiver:
        url = f"http://127.0.0.2:{receiver.port}/"
        allowed = {"webhook_networks": ("127.0.0.2/32",), "webhook_allow_http": True, "webhook_ports": (receiver.port,)}
        assert send(url, **allowed) == Outcome(status=status)


def test_http_and_other_ports_need_the_operators_word(canary: Listener) -> None:
    allowed: dict[str, Any] = {"webhook_networks": ("127.0.0.0/8",)}
    assert send(f"http://127.0.0.1:{canary.port}/", **allowed, webhook_ports=(canary.port,)).status is None
    assert send(f"https://127.0.0.1:{canary.port}/", **allowed).status is None


def test_a_compressed_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(50_000_000))
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n".encode()
    with listening("127.0.0.1", answer=head + bomb) as receiver:
        tracemalloc.start()
        try:
            assert send(f"http://127.0.0.1:{receiver.port}/", webhook_allow_private=True) == Outcome(status=200)
            assert tracemalloc.get_traced_memory()[1] < 5_000_000
        finally:
            tracemalloc.stop()
    assert b"Accept-Encoding: identity\r\n" in receiver.got[0]


def test_a_receiver_that_shakes_no_hand_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"https://127.0.0.1:{server.getsockname()[1]}/"
        began = time.monotonic()
        assert send(url, webhook_allow_private=True, webhook_timeout_s=0.3) == NO_ANSWER
        assert time.monotonic() - began < 3


def test_a_resolver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hang(*_: Any, **__: Any) -> list[Any]:
        released.wait(30)
        return []

    monkeypatch.setattr("socket.getaddrinfo", hang)
    assert send("https://receiver.example/", webhook_timeout_s=0.2) == NO_ANSWER
    released.set()


def test_what_is_no_http_is_an_outcome() -> None:
    with listening("127.0.0.1", answer=b"SSH-2.0-OpenSSH\r\n") as receiver:
        assert send(f"http://127.0.0.1:{receiver.port}/", webhook_allow_private=True) == Outcome(
            error="the answer was not HTTP"
        )


# ---- certificates


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of receiver.example that signs itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "receiver.example")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("receiver.example")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


@pytest.mark.parametrize(
    ("host", "is_trusted", "outcome"),
    [
        ("receiver.example", True, Outcome(status=200)),
        ("other.example", True, Outcome(error="the receiver's certificate or TLS was refused")),
        ("receiver.example", False, Outcome(error="the receiver's certificate or TLS was refused")),
    ],
)
def test_the_certificate_must_name_the_host_though_an_address_is_connected_to(
    certificate: Path,
    resolver: Resolve,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    is_trusted: bool,
    outcome: Outcome,
) -> None:
    if is_trusted:
        trusting = ssl.create_default_context(cafile=str(certificate))
        monkeypatch.setattr(posts, "tls_context", lambda: trusting)
    asked_names: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.sni_callback = lambda _, name, __: asked_names.append(name)
    resolver(["127.0.0.2"])
    with listening("127.0.0.2", tls=context) as receiver:
        allowed = {"webhook_networks": ("127.0.0.2/32",), "webhook_ports": (receiver.port,)}
        assert send(f"https://{host}:{receiver.port}/", **allowed) == outcome
    assert asked_names == [host]


def test_listed_networks_hold_in_every_spelling() -> None:
    settings = Settings(webhook_networks=("10.20.0.0/16",))
    for text, may in (
        ("10.20.1.1", True),
        ("::ffff:10.20.1.1", True),
        ("10.21.0.1", False),
        ("64:ff9b::a14:101", False),
    ):
        assert posts.may_receive(ipaddress.ip_address(text), settings) is may, text
