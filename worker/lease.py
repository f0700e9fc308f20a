"""A worker's right to its jobs: alive while its row's heartbeat is fresh and nobody declared it dead."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable

import redis
from sqlalchemy import delete, select, update
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError
from sqlalchemy.orm import Session

from app import claims, db, events
from app.db import Database
from app.ids import new_id
from app.tables import NOW, Job, Worker
from engine.request import Engine
from worker.attempts import Attempt, Attempts
from worker.metrics import WorkerMetrics
from worker.progress import ProgressWriter
from worker.vital import end_process, vital_thread

logger = logging.getLogger(__name__)

REGISTER_RETRY_S = 0.5
"""Pause between tries to register while there is no database, or one that was not migrated yet."""


class Lease:
    """Keeps one worker incarnation alive in Postgres, and what it holds in step with what Postgres says it owns."""

    def __init__(
        self,
        database: Database,
        client: redis.Redis,
        attempts: Attempts,
        engine: Engine,
        writer: ProgressWriter,
        *,
        model_name: str,
        metrics_url: str | None,
        heartbeat_s: float,
        is_ready: Callable[[], bool],
        metrics: WorkerMetrics,
        on_freed: Callable[[], None],
    ) -> None:
        """Register, as soon as there is a database, and beat from then on.

        is_ready says whether jobs are taken: each beat tells it. on_freed is called, on the lease's thread, when jobs
        were handed back.
        """
        self._database = database
        self._redis = client
        self._attempts = attempts
        self._engine = engine
        self._writer = writer
        self._model_name = model_name
        self._metrics_url = metrics_url
        self._heartbeat_s = heartbeat_s
        self._is_ready = is_ready
        self._metrics = metrics
        self._on_freed = on_freed
        self._strays: set[str] = set()
        self._closed = threading.Event()
        self._owner = self._register()
        self._thread = vital_thread("lease", self._run)

    @property
    def owner(self) -> str:
        """The id of this worker's present incarnation."""
        return self._owner

    def leave(self) -> None:
        """Hand back what still runs, and take the row away; the process ends in good order.

        Failing that, the row's heartbeat grows old, and the sweep does the same.
        """
        self._closed.set()
        self._thread.join()
        remaining = [attempt.claim.job_id for attempt in self._attempts.all() if attempt.owner == self._owner]
        try:
            with self._database.transaction() as session:
                handed_back = claims.hand_back(session, self._owner, remaining)
                session.execute(delete(Worker).where(Worker.id == self._owner))
        except SQLAlchemyError as error:
            logger.warning("%d jobs were not handed back, the sweep will: %s", len(remaining), error)
            return
        events.announce(self._redis, handed_back)
        logger.info("handed back %d jobs", len(handed_back))

    def _register(self) -> str:
        """A new incarnation: a row with a fresh id."""
        stats = self._engine.stats()
        worker = Worker(
            id=new_id("worker"),
            model=self._model_name,
            host=socket.gethostname(),
            pid=os.getpid(),
            slots=stats.slots,
            ready=self._is_ready(),
            metrics_url=self._metrics_url,
            steps=stats.steps,
            dead=False,
        )
        while True:
            try:
                with self._database.transaction() as session:
                    session.add(worker)
                logger.info("worker %s serves %s", worker.id, self._model_name)
                return worker.id
            except ProgrammingError as error:  # a table or column is not there
                logger.warning(
                    "the worker waits for tables of its own version: run `alembic upgrade head`, or start"
                    " `everbatch up` anew (%s)",
                    db.reason(error),
                )
            except SQLAlchemyError as error:
                logger.warning("the worker is not registered yet: %s", db.reason(error))
            if self._closed.wait(REGISTER_RETRY_S):
                return worker.id  # it never was there, and owns nothing

    def _run(self) -> None:
        while not self._closed.wait(self._heartbeat_s):
            try:
                self._beat()
            except SQLAlchemyError as error:
                self._metrics.failed_beats.inc()
                logger.warning("a heartbeat failed: %s", error)

    def _beat(self) -> None:
        # Before the database is asked: whoever runs here by then is ours there, or has been taken from us.
        held = self._attempts.all()
        with self._database.autocommit() as session:
            is_alive = self._refresh(session)
            owned = self._owned(session)
        if is_alive:
            self._reconcile(held, owned)
        else:
            # Declared dead: nothing that runs here is ours any more. Drop it, and come back as somebody else.
            logger.warning("worker %s was declared dead and drops %d jobs", self._owner, len(held))
            self._owner = self._register()
            self._reconcile(held, {})

    def _refresh(self, session: Session) -> bool:
        """Beat; False when this incarnation was declared dead."""
        stats = self._engine.stats()
        beaten = session.execute(
            update(Worker)
            .where(Worker.id == self._owner, Worker.dead.is_(False))
            .values(heartbeat_at=NOW, steps=stats.steps, ready=self._is_ready())
            .returning(Worker.id)
        )
        return beaten.first() is not None

    def _owned(self, session: Session) -> dict[str, int]:
        """The jobs that Postgres says run here, and the attempt of each."""
        rows = session.execute(select(Job.id, Job.attempt).where(Job.owner == self._owner, Job.status == "running"))
        return {row.id: row.attempt for row in rows}

    def _reconcile(self, held: list[Attempt], owned: dict[str, int]) -> None:
        """Drop what Postgres gives to nobody or to others; hand back what it gives us and nobody here runs.

        The first is how a cancel reaches a job that waits in the engine and writes nothing. The second heals a claim
        whose reply was lost. A job counts as stray only when seen twice: it may just be ending.
        """
        taken = [
            attempt
            for attempt in held
            if attempt.owner != self._owner or owned.get(attempt.claim.job_id) != attempt.claim.attempt
        ]
        if taken:
            self._writer.lose(taken)
        strays = owned.keys() - self._attempts.job_ids()
        confirmed, self._strays = strays & self._strays, strays
        if confirmed:
            self._hand_back_strays(confirmed)

    def _hand_back_strays(self, job_ids: set[str]) -> None:
        with self._database.transaction() as session:
            handed_back = claims.hand_back(session, self._owner, job_ids)
        events.announce(self._redis, handed_back)
        self._metrics.strays.inc(len(handed_back))
        logger.warning("handed back %d jobs that were ours and did not run", len(handed_back))
        self._on_freed()


class Watchdog:
    """Ends a process whose engine has work and makes no step, or whose engine's thread has died.

    Progress is health: a worker that hangs goes on beating, and its jobs would wait for it for ever.
    """

    TICK_S = 1.0

    def __init__(self, engine: Engine, *, patience_s: float) -> None:
        self._engine = engine
        self._patience_s = patience_s
        self._closed = threading.Event()
        vital_thread("watchdog", self._run)

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        last_step, stuck_s = -1, 0.0
        while not self._closed.wait(self.TICK_S):
            if self._engine.failure is not None:
                logger.critical("the engine failed: %s", self._engine.failure)
                end_process()
            stats = self._engine.stats()
            has_work = stats.running + stats.waiting > stats.compiling
            # Ticks are counted, not the clock: a process that was stopped for a while did not hang.
            stuck_s = stuck_s + self.TICK_S if has_work and stats.steps == last_step else 0.0
            last_step = stats.steps
            if stuck_s >= self._patience_s:
                logger.critical("the engine made no step in %s s with %d jobs running", stuck_s, stats.running)
                end_process()
