"""Takes submissions in: each is durable before its answer, and those that come at once share a commit.

While one transaction of a tenant is under way, his further submissions gather; the next one writes them all. Each is
answered as if it had come alone: a refusal of one is nothing to the others. Tenants do not wait for each other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError

from app import jobs
from app.db import Database
from app.jobs import Idempotency, Order, Submission, Submitted

MOST = 64
"""Submissions in one transaction."""


@dataclass(eq=False, slots=True)
class _Guest:
    """A submission that waits, on its own thread."""

    order: Order
    called: threading.Event = field(default_factory=threading.Event)
    outcome: Submitted | Exception | None = None
    """None when it is called to write, for itself and those that gathered behind it."""


class Reception:
    """One for a process."""

    def __init__(self, database: Database, *, max_queued: int) -> None:
        """max_queued is how many jobs a tenant may have in line."""
        self._database = database
        self._max_queued = max_queued
        self._lock = threading.Lock()
        self._lines: dict[str, deque[_Guest]] = {}
        """Those that gather, by tenant; a tenant is here while somebody writes for him."""

    def submit(self, tenant_id: str, submission: Submission, idempotency: Idempotency | None = None) -> Submitted:
        """Write a job and return once it is durable. Raises what jobs.submit does."""
        guest = _Guest(Order(submission, idempotency))
        with self._lock:
            is_first = tenant_id not in self._lines
            self._lines.setdefault(tenant_id, deque()).append(guest)
        if not is_first:
            guest.called.wait()
        if guest.outcome is None:
            self._write_for_all(tenant_id)
        assert guest.outcome is not None
        if isinstance(guest.outcome, Exception):
            raise guest.outcome
        return guest.outcome

    def waiting(self, tenant_id: str) -> int:
        """How many of the tenant's submissions gather for the next transaction."""
        with self._lock:
            return len(self._lines.get(tenant_id, ()))

    def _write_for_all(self, tenant_id: str) -> None:
        """Write what has gathered, call the next one to do so, answer."""
        guests = self._gathered(tenant_id)
        outcomes: Sequence[Submitted | Exception]
        try:
            outcomes = self._write(tenant_id, [guest.order for guest in guests])
        except Exception as error:
            outcomes = [error] * len(guests)
        finally:
            self._call_next(tenant_id)
        for guest, outcome in zip(guests, outcomes, strict=True):
            guest.outcome = outcome
            guest.called.set()

    def _gathered(self, tenant_id: str) -> list[_Guest]:
        """The first in line, who writes, and those behind him; of each key one, for the next ones replay it."""
        taken: list[_Guest] = []
        left: list[_Guest] = []
        keys: set[str] = set()
        with self._lock:
            line = self._lines[tenant_id]
            while line and len(taken) < MOST:
                guest = line.popleft()
                key = None if guest.order.idempotency is None else guest.order.idempotency.key
                if key in keys:
                    left.append(guest)
                    continue
                taken.append(guest)
                if key is not None:
                    keys.add(key)
            line.extendleft(reversed(left))
        return taken

    def _call_next(self, tenant_id: str) -> None:
        with self._lock:
            line = self._lines[tenant_id]
            if line:
                line[0].called.set()
            else:
                del self._lines[tenant_id]

    def _write(self, tenant_id: str, orders: Sequence[Order]) -> Sequence[Submitted | Exception]:
        """One transaction for all; one for each where something in one of them breaks it."""
        try:
            with self._database.transaction() as session:
                return jobs.submit_all(session, tenant_id, orders, max_queued=self._max_queued)
        except (OperationalError, InterfaceError, InternalError):
            raise  # the database is away: it would take none of them
        except DBAPIError as error:
            if len(orders) == 1:
                return [error]
            return [outcome for order in orders for outcome in self._write(tenant_id, [order])]
