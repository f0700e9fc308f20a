"""Deliveries against receivers that behave, fail, redirect, hang and drip."""

from __future__ import annotations

import base64
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import select, update
from standardwebhooks import Webhook

from app import broker, db, deliveries, signatures, tables, tenants
from app.addresses import origin_of
from app.broker import Broker, BrokerError
from app.db import Database
from app.deliveries import Outcome, Outgoing
from app.ids import new_id
from app.settings import Settings
from app.tables import Delivery
from app.tiers import Plan
from app.vault import Vault
from worker.posts import post
from worker.webhooks import deliver, send_due

SECRET = signatures.new_secret()


@dataclass
class Receiver:
    """A real HTTP server on loopback that answers as the test says, and keeps what it got."""

    answer: Callable[[BaseHTTPRequestHandler], None] = field(default=lambda handler: reply(handler, 200))
    got: queue.Queue[tuple[dict[str, str], bytes]] = field(default_factory=queue.Queue)
    url: str = ""

    def next(self) -> tuple[dict[str, str], bytes]:
        return self.got.get(timeout=5)


def reply(handler: BaseHTTPRequestHandler, status: int, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiving = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiving.got.put((dict(self.headers), body))
            receiving.answer(self)

        def do_GET(self) -> None:
            receiving.got.put((dict(self.headers), b"GET"))
            reply(self, 200)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    receiving.url = f"http://127.0.0.1:{server.server_port}/hook"
    yield receiving
    server.shutdown()
    server.server_close()
    thread.join(5)


def settings(**values: Any) -> Settings:
    return Settings(**{"webhook_allow_private": True, "webhook_timeout_s": 5.0} | values)


def post_to(url: str, **values: Any) -> Outcome:
    return post(Outgoing(url=url, body='{"a":1}', secrets=(SECRET,)), "evt_1", settings(**values))


# ---- one attempt


def test_a_receiver_can_verify_what_it_gets(receiver: Receiver) -> None:
    assert post_to(receiver.url) == Outcome(status=200)
    headers, body = receiver.next()
    assert headers["Content-Type"] == "application/json"
    assert Webhook(SECRET).verify(body, headers) == {"a": 1}


@pytest.mark.parametrize("status", [204, 400, 410, 500])
def test_the_status_is_the_outcome(receiver: Receiver, status: int) -> None:
    receiver.answer = lambda handler: reply(handler, status)
    assert post_to(receiver.url).status == status


def test_redirects_are_not_followed(receiver: Receiver) -> None:
    receiver.answer = lambda handler: reply(handler, 307, Location=receiver.url)
    assert post_to(receiver.url) == Outcome(status=307)
    receiver.next()
    assert receiver.got.empty()


def test_proxies_of_the_environment_are_not_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert post_to(receiver.url) == Outcome(status=200)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("120", 120.0), ("0", 0.0), ("soon", None), ("-5", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)],
)
def test_retry_after_is_read(receiver: Receiver, header: str, seconds: float | None) -> None:
    receiver.answer = lambda handler: reply(handler, 429, Retry_After=header)
    assert post_to(receiver.url) == Outcome(status=429, retry_after_s=seconds)


def test_retry_after_may_be_a_date(receiver: Receiver) -> None:
    receiver.answer = lambda handler: reply(handler, 503, Retry_After=formatdate(time.time() + 600, usegmt=True))
    asked_s = post_to(receiver.url).retry_after_s
    assert asked_s is not None
    assert 590 < asked_s <= 600


def test_a_receiver_that_hangs_is_given_up(receiver: Receiver) -> None:
    released = threading.Event()

    def hang(_: BaseHTTPRequestHandler) -> None:
        released.wait(30)

    receiver.answer = hang
    assert post_to(receiver.url, webhook_timeout_s=0.2) == Outcome(error="there was no answer in time")
    released.set()


def test_a_receiver_that_drips_its_headers_is_given_up(receiver: Receiver) -> None:
    """Each byte comes well within the timeout of a read; together they would take for ever."""
    ended = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        try:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Drip: ")
            while not ended.wait(0.02):
                handler.wfile.write(b"x")
        except OSError:
            ended.set()

    receiver.answer = drip
    assert post_to(receiver.url, webhook_timeout_s=0.3) == Outcome(error="there was no answer in time")
    assert ended.wait(5)


def test_an_endless_reply_is_cut_off_and_counts_by_its_status(receiver: Receiver) -> None:
    cut = threading.Event()

    def flood(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b"x" * 65_536)
        except OSError:
            cut.set()

    receiver.answer = flood
    assert post_to(receiver.url) == Outcome(status=200)
    assert cut.wait(5)


def test_nobody_listening_is_an_outcome(receiver: Receiver) -> None:
    assert post_to("http://127.0.0.1:1/") == Outcome(error="the connection failed")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_private_receivers_are_refused_by_default(receiver: Receiver, host: str) -> None:
    port = receiver.url.split(":")[2].split("/")[0]
    outcome = post_to(f"https://{host}:{port}/", webhook_allow_private=False)
    assert outcome.status is None
    assert receiver.got.empty()


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "::1", "64:ff9b::7f00:1", "::ffff:169.254.169.254"])
def test_a_public_name_with_an_address_inside_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """What a name means is decided when it is used, by the address that is then connected to."""
    asked: list[str] = []

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        family = 10 if ":" in address else 2
        return [(family, 1, 6, "", (address, 443))]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    outcome = post_to("https://receiver.example/", webhook_allow_private=False)
    assert outcome == Outcome(error="the host has an address that is not public")
    assert asked == ["receiver.example"]  # once: a second answer could be another one


# ---- rounds


@dataclass(frozen=True)
class Office:
    """A database with one tenant, a vault and a broker."""

    database: Database
    vault: Vault
    broker: Broker
    redis: redis.Redis
    tenant_id: str
    secret: str

    def add(self, url: str) -> str:
        with self.database.transaction() as session:
            delivery = Delivery(
                id=new_id("evt"),
                tenant_id=self.tenant_id,
                job_id="job_1",
                receiver=origin_of(url),
                event_type="job.succeeded",
                url=url,
                body=json.dumps({"type": "job.succeeded"}),
                status="pending",
                attempts=0,
                next_at=db.now(session),
            )
            session.add(delivery)
            return delivery.id

    def messages(self) -> list[dict[str, Any]]:
        """Take what the queue of deliveries holds: the keyword arguments of each message."""
        raw = self.redis.lrange(broker.DELIVERIES, 0, -1)
        self.redis.delete(broker.DELIVERIES)
        bodies = [json.loads(base64.b64decode(json.loads(each)["body"])) for each in reversed(raw)]
        return [kwargs for _, kwargs, _ in bodies]

    def round(self) -> None:
        """Announce what is due and do what the messages say, each twice: messages may be doubled."""
        send_due(self.database, self.broker)
        for kwargs in self.messages():
            for _ in range(2):
                deliver(self.database, self.vault, settings(), **kwargs)

    def make_due(self) -> None:
        with self.database.transaction() as session:
            session.execute(update(Delivery).where(Delivery.status != "dead").values(next_at=tables.NOW))

    def row(self, delivery_id: str) -> Delivery:
        with self.database.transaction() as session:
            return session.scalars(select(Delivery).where(Delivery.id == delivery_id)).one()


@pytest.fixture
def office(database: str, redis_url: str, tmp_path: Path) -> Iterator[Office]:
    opened, client, sender = Database(database), redis.Redis.from_url(redis_url), Broker(redis_url)
    client.delete(broker.DELIVERIES)
    vault = Vault.open(Settings(home=tmp_path))
    with opened.transaction() as session:
        session.execute(update(Delivery).values(status="dead"))  # of the tests before
        made = tenants.provision(session, vault, name=new_id("name"), plan=Plan.PAID)
    yield Office(opened, vault, sender, client, made.tenant_id, made.webhook_secret)
    sender.close()
    client.close()
    opened.close()


def test_a_failing_receiver_gets_the_same_id_and_body_until_it_takes_it(office: Office, receiver: Receiver) -> None:
    statuses = iter([500, 429, 200])
    receiver.answer = lambda handler: reply(handler, next(statuses))
    delivery_id = office.add(receiver.url)
    for _ in range(4):
        office.round()
        office.make_due()
    received = [receiver.next() for _ in range(3)]
    assert receiver.got.empty()
    assert {headers["webhook-id"] for headers, _ in received} == {delivery_id}
    assert len({body for _, body in received}) == 1
    for headers, body in received:
        assert Webhook(office.secret).verify(body, headers) == {"type": "job.succeeded"}
    row = office.row(delivery_id)
    assert (row.status, row.attempts, row.response_status) == ("delivered", 3, 200)


def test_a_receiver_that_is_gone_is_left_alone(office: Office, receiver: Receiver) -> None:
    receiver.answer = lambda handler: reply(handler, 410)
    delivery_id = office.add(receiver.url)
    for _ in range(2):
        office.round()
        office.make_due()
    receiver.next()
    assert receiver.got.empty()
    assert office.row(delivery_id).status == "dead"


def test_a_message_lost_at_the_broker_is_sent_again(office: Office, receiver: Receiver) -> None:
    delivery_id = office.add(receiver.url)
    send_due(office.database, office.broker)
    assert office.messages() == [{"delivery_id": delivery_id, "attempt": 1}]  # and lost
    office.round()
    assert receiver.got.empty()
    office.make_due()  # its lease has run out
    office.round()
    assert office.row(delivery_id).status == "delivered"


def test_concurrent_duplicates_of_a_message_post_once(office: Office, receiver: Receiver) -> None:
    office.add(receiver.url)
    send_due(office.database, office.broker)
    (kwargs,) = office.messages()
    with ThreadPoolExecutor(5) as pool:
        for done in [pool.submit(deliver, office.database, office.vault, settings(), **kwargs) for _ in range(5)]:
            done.result()
    receiver.next()
    assert receiver.got.empty()


def test_without_a_broker_deliveries_stay_due(office: Office) -> None:
    delivery_id = office.add("https://example.com/")
    nowhere = Broker("redis://127.0.0.1:1/0")
    with pytest.raises(BrokerError):
        send_due(office.database, nowhere)
    nowhere.close()
    with office.database.transaction() as session:
        assert deliveries.due(session, 10) == [(delivery_id, 1)]
