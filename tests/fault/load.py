"""Clients that submit, follow, cancel and receive webhooks, whatever becomes of the service meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from app.cli.demo.receiver import Receiver
from app.client import Client, Event, Job, Refused, Unreachable
from tests.fault.service import Account, Service

T = TypeVar("T")

SUBMITTERS = 3
FOLLOWERS = 12
PAUSE_S = 0.3
"""Between two submissions of a submitter, in the mean."""
TRANSIENT = (429, 502, 503, 504)
"""Answers that ask to come again."""


@dataclass
class Order:
    """A job that was accepted, and what its client saw of it."""

    job_id: str
    account: Account
    has_webhook: bool
    max_tokens: int
    seed: int
    num_choices: int = 1
    cancelled: bool = False
    """Its cancel was answered with 200."""
    events: list[Event] | None = None
    """What a follower got, whatever connections it took; None where nobody followed."""


@dataclass
class Load:
    """Runs from start to stop. Clients try for as long as the service is away."""

    service: Service
    receiver: Receiver
    seed: int
    orders: list[Order] = field(default_factory=list)
    webhooks: list[tuple[str, dict[str, Any] | None]] = field(default_factory=list)
    """What came to the receiver: the webhook-id, and the event where a tenant's secret proves it."""
    complaints: list[str] = field(default_factory=list)
    """Answers that no client should get."""

    def start(self) -> None:
        self._stopped, self._given_up = threading.Event(), threading.Event()
        self._clients = {account.key: Client(self.service.url, account.key) for account in self.service.accounts}
        self._pool = ThreadPoolExecutor(FOLLOWERS)
        self._pool_of_probes = ThreadPoolExecutor(1)
        self._threads = [
            threading.Thread(target=self._submit_on, args=(random.Random(f"{self.seed}/{number}"),))
            for number in range(SUBMITTERS)
        ]
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._verify_on, name="verifier", daemon=True).start()

    def probe(self) -> threading.Event:
        """Have a small paid job run to its end; set when it has."""
        succeeded = threading.Event()
        order = Order("", self.service.accounts[0], False, 3, random.getrandbits(40))
        client = self._clients[order.account.key]

        def run() -> None:
            order.job_id = self._insist(
                lambda: client.submit("probe", max_tokens=3, seed=order.seed, idempotency_key=f"{order.seed:x}")
            )["id"]
            self.orders.append(order)
            while self._insist(lambda: client.get(order.job_id))["status"] != "succeeded":
                time.sleep(0.05)
            succeeded.set()

        self._pool_of_probes.submit(run)
        return succeeded

    def give_up(self) -> None:
        """Whoever still waits for an answer complains instead."""
        self._given_up.set()

    def stop(self) -> None:
        """No more jobs. Returns once all that was under way has been answered and all followers saw their jobs end."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._pool.shutdown()
        self._pool_of_probes.shutdown()
        for client in self._clients.values():
            client.close()

    def _verify_on(self) -> None:
        """Verify each webhook as it comes: a signature is good for five minutes."""
        secrets = [account.webhook_secret for account in self.service.accounts]
        while (post := self.receiver.inbox.get()) is not None:
            verified = (event for secret in secrets if (event := post.verified(secret)) is not None)
            self.webhooks.append((post.headers["webhook-id"], next(verified, None)))

    def _submit_on(self, rng: random.Random) -> None:
        while not self._stopped.is_set():
            try:
                self._one(rng)
            except Exception as error:
                self.complaints.append(f"a client got {type(error).__name__}: {error}")
            self._stopped.wait(rng.expovariate(1 / PAUSE_S))

    def _one(self, rng: random.Random) -> None:
        """One job, perhaps submitted twice, perhaps followed, perhaps cancelled."""
        account = rng.choice(self.service.accounts)
        client = self._clients[account.key]
        order = Order("", account, rng.random() < 0.3, rng.randint(1, 150), rng.getrandbits(40), rng.choice((1, 1, 3)))
        fields = {
            "max_tokens": order.max_tokens,
            "seed": order.seed,
            "n": order.num_choices,
            **({"logprobs": True, "top_logprobs": 1} if rng.random() < 0.2 else {}),
            **({"service_tier": "flex"} if rng.random() < 0.4 else {}),
            **({"webhook": {"url": self.receiver.url}} if order.has_webhook else {}),
        }
        key = f"{rng.getrandbits(64):x}"

        def submit() -> Job:
            return client.submit("Once upon a time", idempotency_key=key, **fields)

        order.job_id = self._insist(submit)["id"]
        if rng.random() < 0.1 and (again := self._insist(submit)["id"]) != order.job_id:
            self.complaints.append(f"one Idempotency-Key made {order.job_id} and {again}")
        self.orders.append(order)
        if rng.random() < 0.3:
            order.events = []
            self._pool.submit(self._follow, client, order)
        if rng.random() < 0.1:
            self._stopped.wait(rng.uniform(0, 2))
            self._cancel(client, order)

    def _cancel(self, client: Client, order: Order) -> None:
        try:
            order.cancelled = self._insist(lambda: client.cancel(order.job_id))["status"] == "cancelled"
        except Refused as error:
            if error.status != 409:
                raise

    def _follow(self, client: Client, order: Order) -> None:
        assert order.events is not None
        try:
            while not (order.events and order.events[-1].ends_log):
                try:
                    for event in client.events(order.job_id, after=len(order.events)):
                        order.events.append(event)
                except (Unreachable, Refused) as error:
                    if self._given_up.is_set() or (isinstance(error, Refused) and error.status not in TRANSIENT):
                        raise
                    time.sleep(0.5)
        except Exception as error:
            self.complaints.append(f"the follower of {order.job_id} got {type(error).__name__}: {error}")

    def _insist(self, ask: Callable[[], T]) -> T:
        """Ask until there is an answer. Raises Refused for one that asking again would not change."""
        while True:
            try:
                return ask()
            except Unreachable:
                time.sleep(0.2)
            except Refused as error:
                if error.status not in TRANSIENT:
                    raise
                time.sleep(0.2)
            if self._given_up.is_set():
                raise TimeoutError("no answer came to the end")
