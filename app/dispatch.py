"""Hands waiting jobs to the broker: the one owner of order between tenants and jobs.

Jobs wait in Postgres. Only a small window per tier is at the broker: the slots of ready workers that no running
job fills, plus a little. Several dispatchers may run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from sqlalchemy import exists, func, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app import line, settlements
from app.broker import Broker, BrokerError
from app.db import Database
from app.line import SUSPECT_DEATHS, Numbered, Waiting
from app.tables import Job, Settlement, TokenCounter
from app.tiers import POLICIES, Tier

logger = logging.getLogger(__name__)

DISPATCH_LOCK = 0x45764264
"""Advisory lock: two dispatchers that counted at once would both fill the same window."""

FULL_S = 0.01
"""Pause after a look that found the window full: only a worker makes room, and its own dispatcher is nudged then."""

_IS_SUSPECT_OUT = text(
    """
    select exists (
        select from jobs where model = :model and deaths >= :suspect_deaths and (
            status = 'queued' and dispatch_number is not null
            or status = 'running' and tokens_at_death >= (
                select coalesce(sum(cardinality(token_ids)), 0) from events where job_id = jobs.id
            )
        )
    )
    """
)


def dispatch(database: Database, broker: Broker, model: str) -> int:
    """Fill the window of each tier of the model; return how many jobs were handed to the broker.

    A message that cannot be sent is a lost one: the sweep finds its jobs and they are dispatched again.
    """
    return _fill(database, broker, model) if _look(database, model) is _Seen.ROOM else 0


class _Seen(Enum):
    """What a look at the lines and the window found."""

    NOTHING = auto()
    """No job waits, as nearly always."""
    FULL = auto()
    """No waiting job's tier has room at the broker."""
    ROOM = auto()


def _look(database: Database, model: str) -> _Seen:
    """Without a lock, for nearly all rounds end here."""
    with database.autocommit() as session:
        waiting = line.waiting(session, model)
        if not waiting.tiers:
            return _Seen.NOTHING
        window = _window(session, model)
        has_room = any(window.room(tier) > 0 for tier in waiting.tiers)
        return _Seen.ROOM if has_room or waiting.handed_back else _Seen.FULL  # a suspect goes beyond the window


def _fill(database: Database, broker: Broker, model: str) -> int:
    with database.transaction() as session:
        _lock(session)
        settlements.fold(session)
        waiting, window = line.waiting(session, model), _window(session, model)
        chosen = _take_suspect(session, model, waiting) or {
            tier: _number(session, model, tier, room, waiting)
            for tier in waiting.tiers
            if (room := window.room(tier)) > 0
        }
    for tier, jobs in chosen.items():
        per_task = min(POLICIES[tier].jobs_per_task, window.max_per_task)
        for start in range(0, len(jobs), per_task):
            broker.send_jobs(model, tier, jobs[start : start + per_task])
    return sum(map(len, chosen.values()))


def settle(database: Database) -> None:
    """Do what dispatch did not: fold the settlements of jobs that ended while none waited, see who left the lines."""
    with database.autocommit() as session:
        if not session.scalar(select(exists(Settlement.job_id) | exists().where(TokenCounter.in_line))):
            return
    with database.transaction() as session:
        settlements.wait_for_oldest(session)
        _lock(session)
        settlements.fold(session)
        line.leave(session)


def _lock(session: Session) -> None:
    """Be the only one to number jobs and to write token counters, until the transaction ends."""
    session.execute(select(func.pg_advisory_xact_lock(DISPATCH_LOCK)))


@dataclass(frozen=True, slots=True)
class _Window:
    """What may be at the broker at this moment."""

    free_slots: int
    """Places that ready workers could fill now: each choice of a job fills one. Counted from the jobs themselves: a
    report would be late."""
    max_per_task: int
    """Jobs in one message: at most a quarter of a worker's slots, so that the last one taken hardly overfills it."""
    at_broker: Mapping[Tier, int]

    def room(self, tier: Tier) -> int:
        return self.free_slots + POLICIES[tier].lookahead - self.at_broker.get(tier, 0)


_WINDOW = text(
    """
    select free_slots, most_slots, at_broker from (
        select coalesce(sum(greatest(slots - (
            select coalesce(sum(num_choices), 0) from jobs where owner = workers.id and status = 'running'
        ), 0)), 0) as free_slots, coalesce(max(slots), 0) as most_slots
        from workers where model = :model and not dead and ready
    ) as places cross join (
        select coalesce(jsonb_object_agg(tier, count), '{}') as at_broker from (
            select tier, sum(num_choices) as count from jobs
            where model = :model and status = 'queued' and dispatch_number is not null
            group by tier
        ) as sent
    ) as sent
    """
)


def _window(session: Session, model: str) -> _Window:
    row = session.execute(_WINDOW, {"model": model}).one()
    return _Window(
        free_slots=int(row.free_slots),
        max_per_task=max(1, row.most_slots // 4),
        at_broker={Tier(name): count for name, count in row.at_broker.items()},
    )


def _take_suspect(session: Session, model: str, waiting: Waiting) -> dict[Tier, Numbered]:
    """Number one suspect, unless another one is out and has made no progress yet.

    The worker that dies next then dies under a single suspect: a poison job does not take to its end the jobs that had
    the bad luck to share its batch twice. An innocent one shows a token, and the next may follow. It has the round for
    itself, and so a head start: whatever ends its worker next should not find it without one.
    """
    if not waiting.handed_back:
        return {}
    suspected = session.scalars(
        select(Job.tier)
        .where(
            Job.model == model,
            Job.tier.in_(waiting.handed_back),
            Job.status == "queued",
            Job.dispatch_number.is_(None),
            Job.handed_back,
            Job.deaths >= SUSPECT_DEATHS,
        )
        .distinct()
    ).all()
    if not suspected or session.scalar(_IS_SUSPECT_OUT, {"model": model, "suspect_deaths": SUSPECT_DEATHS}):
        return {}
    tier = min(map(Tier, suspected), key=lambda tier: POLICIES[tier].rank)
    return {tier: line.number_handed_back(session, model, tier, 1, suspects=True)}


def _number(session: Session, model: str, tier: Tier, count: int, waiting: Waiting) -> Numbered:
    """Number up to count jobs: what was handed back, suspects left out, then the tier's line."""
    back = line.number_handed_back(session, model, tier, count) if tier in waiting.handed_back else []
    return [*back, *line.number_next(session, model, tier, count - len(back))]


class Dispatcher:
    """Dispatches when nudged, on a thread of its own; with interval_s also when nobody nudged for so long.

    Nudges that come while it works make one more round, not many.
    """

    def __init__(self, database: Database, broker: Broker, model: str, *, interval_s: float | None = None) -> None:
        self._database = database
        self._broker = broker
        self._model = model
        self._interval_s = interval_s
        self._nudged = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Say that a job waits, or that a slot is free."""
        self._nudged.set()

    def close(self) -> None:
        self._closed.set()
        self._nudged.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._nudged.wait(self._interval_s)
            self._nudged.clear()
            if self._closed.is_set():
                return
            try:
                seen = _look(self._database, self._model)
                if seen is _Seen.FULL:
                    self._closed.wait(FULL_S)
                elif seen is _Seen.ROOM:
                    _fill(self._database, self._broker, self._model)
            except (SQLAlchemyError, BrokerError) as error:
                logger.warning("dispatch failed, the next round tries again: %s", error)
                self._closed.wait(0.5)
