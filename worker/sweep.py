"""The sweep: finds what fell between two chairs. One leader does it, at a steady interval.

Every promise of the service ends here: a dead worker's jobs are put back in line, deadlines end jobs, messages that the
broker lost are forgotten, so that dispatch sends their jobs again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import redis
from sqlalchemy import Connection, and_, delete, exists, func, select, update
from sqlalchemy.orm import Session

from app import events, recovery
from app.broker import Broker
from app.db import Database
from app.events import Event
from app.tables import STATEMENT_TIME, Job, Worker
from app.tiers import Tier
from worker.metrics import IoMetrics

logger = logging.getLogger(__name__)

SWEEP_LOCK = 0x45764253
"""Advisory lock of the leader, held by a session: it is free as soon as the leader's connection is gone."""
GRACE_S = 2.0
"""A message younger than this is not taken for lost: a worker may hold it and be about to claim."""
LIMIT = 500
"""Jobs moved in one transaction."""
KEEP_DEAD_WORKERS = timedelta(hours=1)
"""For those who look into what happened."""
_IS_BYGONE = and_(
    Worker.dead,
    Worker.heartbeat_at < STATEMENT_TIME - KEEP_DEAD_WORKERS,
    ~exists().where(Job.owner == Worker.id, Job.status == "running"),
)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Which kinds of work a sweep found; nearly always none."""

    silent_workers: bool
    orphans: bool
    expired: bool
    unclaimed: bool
    bygone_workers: bool


class Sweeper:
    def __init__(
        self,
        database: Database,
        client: redis.Redis,
        broker: Broker,
        *,
        lease_s: float,
        max_deaths: int,
        metrics: IoMetrics,
        on_requeued: Callable[[], None],
    ) -> None:
        """on_requeued is called after a sweep that put jobs back in line."""
        self._database = database
        self._redis = client
        self._broker = broker
        self._lease_s = lease_s
        self._max_deaths = max_deaths
        self._metrics = metrics
        self._on_requeued = on_requeued
        self._leadership: Connection | None = None
        self._leader_since = 0.0
        self._is_silent = and_(
            Worker.dead.is_(False), Worker.heartbeat_at < STATEMENT_TIME - timedelta(seconds=lease_s)
        )
        self._look_statement = select(
            exists().where(self._is_silent).label("silent_workers"),
            exists().where(recovery.IS_ORPHAN).label("orphans"),
            exists().where(recovery.IS_EXPIRED).label("expired"),
            exists().where(recovery.is_unclaimed(GRACE_S)).label("unclaimed"),
            exists().where(_IS_BYGONE).label("bygone_workers"),
        )

    def sweep(self) -> None:
        """One round, if this process leads. Raises what the servers raise; the next round begins anew.

        A fresh leader waits for one lease before it declares anybody dead: while the database was away, nobody could
        send a heartbeat.
        """
        leadership = self._leadership or self._run_for_leader()
        if leadership is None:
            return
        seen = self._look(leadership)
        may_declare = time.monotonic() - self._leader_since >= self._lease_s
        if seen.silent_workers and may_declare:
            self._declare_dead()
        requeued = forgotten = 0
        if seen.orphans or seen.silent_workers:
            moved = self._move_all(
                lambda session: recovery.requeue_orphans(session, max_deaths=self._max_deaths, limit=LIMIT)
            )
            requeued = moved["queued"]
            self._metrics.requeued.inc(requeued)
            self._metrics.poison.inc(moved["failed"])
        if seen.expired:
            self._metrics.expired.inc(self._move_all(lambda session: recovery.expire(session, limit=LIMIT)).total())
        if seen.unclaimed:
            forgotten = self._forget_lost_messages()
        if seen.bygone_workers:
            self._drop_dead_workers()
        if requeued or forgotten:
            self._on_requeued()
        self._metrics.last_sweep.set_to_current_time()

    def _look(self, leadership: Connection) -> _Seen:
        """What there is to do: all that a quiet round asks. It also shows that the lock is still held."""
        try:
            return _Seen(**leadership.execute(self._look_statement).mappings().one())
        except BaseException:
            self._resign()
            raise

    def _run_for_leader(self) -> Connection | None:
        """The connection that holds the lock, if this process gets it now."""
        connection = self._database.pool.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            is_leader = connection.scalar(select(func.pg_try_advisory_lock(SWEEP_LOCK)))
        except BaseException:
            connection.invalidate()
            connection.close()
            raise
        if not is_leader:
            connection.close()
            return None
        self._leadership, self._leader_since = connection, time.monotonic()
        self._metrics.leads.set(1)
        logger.info("this process sweeps")
        return connection

    def _resign(self) -> None:
        """Give up a connection that may be broken, rather than return it, with its lock, to the pool."""
        if self._leadership is not None:
            self._leadership.invalidate()
            self._leadership.close()
            self._leadership = None
            self._metrics.leads.set(0)

    def _declare_dead(self) -> None:
        """By the database's clock alone. From this commit on, the worker can claim nothing and learns it is dead."""
        with self._database.autocommit() as session:
            dead = session.scalars(update(Worker).where(self._is_silent).values(dead=True).returning(Worker.id)).all()
        self._metrics.deaths.inc(len(dead))
        for worker_id in dead:
            logger.warning("worker %s sent no heartbeat for %s s and is declared dead", worker_id, self._lease_s)

    def _move_all(self, move: Callable[[Session], list[Event]]) -> Counter[str]:
        """Move jobs, a transaction at a time, until fewer than LIMIT are found; announce them.

        Returns how many came to be what.
        """
        total: Counter[str] = Counter()
        while True:
            with self._database.transaction() as session:
                moved = move(session)
            events.announce(self._redis, moved)
            total.update(event.kind for event in moved)
            if len(moved) < LIMIT:
                return total

    def _forget_lost_messages(self) -> int:
        """For each queue that should hold something. Raises RedisError when the broker cannot be asked."""
        with self._database.autocommit() as session:
            named = session.execute(
                select(Job.model, Job.tier).where(Job.status == "queued", Job.dispatch_number.is_not(None)).distinct()
            ).all()
        forgotten = 0
        for model, tier_name in named:
            tier = Tier(tier_name)
            is_empty = self._broker.waiting(model, tier) == 0
            with self._database.autocommit() as session:
                lost = recovery.forget_lost_messages(session, model, tier, queue_is_empty=is_empty, grace_s=GRACE_S)
            if lost:
                logger.warning("%d messages of %s jobs for %s were lost; their jobs are sent again", lost, tier, model)
            self._metrics.lost_messages.labels(tier.value).inc(lost)
            forgotten += lost
        return forgotten

    def _drop_dead_workers(self) -> None:
        """Forget workers that died a while ago and own nothing."""
        with self._database.autocommit() as session:
            session.execute(delete(Worker).where(_IS_BYGONE))
