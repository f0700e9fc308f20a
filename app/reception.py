"""Takes submissions in: each is durable before its answer, and those that come at once share a commit.

While one transaction of a tenant is under way, his further submissions to the same tier gather; the next one writes
them all. Each is answered as if it had come alone: a refusal of one is nothing to the others. Tenants do not wait for
each other, nor do tiers.
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
from app.tiers import Tier, TierTable

MOST = 64
"""Submissions in one transaction."""


_Line = tuple[str, Tier]
"""A tenant, and a tier of its submissions."""


@dataclass(eq=False, slots=True)
class _Guest:
    """A submission that waits, on its own thread."""

    order: Order
    called: threading.Event = field(default_factory=threading.Event)
    outcome: Submitted | Exception | None = None
    """None when it is called to write, for itself and those that gathered behind it."""


class Reception:
    """One for a process."""

    def __init__(self, database: Database, tiers: TierTable) -> None:
        self._database = database
        self._tiers = tiers
        self._lock = threading.Lock()
        self._lines: dict[_Line, deque[_Guest]] = {}
        """Those that gather; a line is here while somebody writes for it."""

    def submit(self, tenant_id: str, submission: Submission, idempotency: Idempotency | None = None) -> Submitted:
        """Write a job and return once it is durable. Raises what jobs.submit refuses."""
        line = (tenant_id, submission.tier)
        guest = _Guest(Order(submission, idempotency))
        with self._lock:
            is_first = line not in self._lines
            self._lines.setdefault(line, deque()).append(guest)
        if not is_first:
            guest.called.wait()
        if guest.outcome is None:
            self._write_for_all(line)
        assert guest.outcome is not None
        if isinstance(guest.outcome, Exception):
            raise guest.outcome
        return guest.outcome

    def waiting(self, tenant_id: str, tier: Tier) -> int:
        """How many of the tenant's submissions gather for the next transaction."""
        with self._lock:
            return len(self._lines.get((tenant_id, tier), ()))

    def _write_for_all(self, line: _Line) -> None:
        """Write what has gathered, call the next one to do so, answer."""
        guests = self._gathered(line)
        outcomes: Sequence[Submitted | Exception]
        try:
            outcomes = self._write(line, [guest.order for guest in guests])
        except Exception as error:
            outcomes = [error] * len(guests)
        finally:
            self._call_next(line)
        for guest, outcome in zip(guests, outcomes, strict=True):
            guest.outcome = outcome
            guest.called.set()

    def _gathered(self, line: _Line) -> list[_Guest]:
        """The first in line, who writes, and those behind him; of each key one, for the next ones replay it."""
        taken: list[_Guest] = []
        left: list[_Guest] = []
        keys: set[str] = set()
        with self._lock:
            gathering = self._lines[line]
            while gathering and len(taken) < MOST:
                guest = gathering.popleft()
                key = None if guest.order.idempotency is None else guest.order.idempotency.key
                if key in keys:
                    left.append(guest)
                    continue
                taken.append(guest)
                if key is not None:
                    keys.add(key)
            gathering.extendleft(reversed(left))
        return taken

    def _call_next(self, line: _Line) -> None:
        with self._lock:
            if gathering := self._lines[line]:
                gathering[0].called.set()
            else:
                del self._lines[line]

    def _write(self, line: _Line, orders: Sequence[Order]) -> Sequence[Submitted | Exception]:
        """One transaction for all; one for each where something in one of them breaks it."""
        tenant_id, tier = line
        try:
            with self._database.transaction() as session:
                return jobs.submit(session, tenant_id, orders, max_queued=self._tiers[tier].max_queued_jobs)
        except (OperationalError, InterfaceError, InternalError):
            raise  # the database is away: it would take none of them
        except DBAPIError as error:
            if len(orders) == 1:
                return [error]
            return [outcome for order in orders for outcome in self._write(line, [order])]
