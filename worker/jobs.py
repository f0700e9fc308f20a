"""Runs jobs: message → claim → engine → events → finish.

A message is a hint, Postgres decides. A job is claimed first, durably, and only then is its message acknowledged: dying
in between leaves a duplicate message, which claims nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
from sqlalchemy.exc import SQLAlchemyError

from app import claims, events
from app.broker import Broker
from app.claims import Claim
from app.db import Database
from app.dispatch import Dispatcher
from app.metrics import MetricsServer
from app.models import Model
from app.moves import Status
from app.settings import Settings
from app.tiers import POLICIES, Tier
from engine.loop import EngineStoppedError
from engine.request import Engine, Request, Sampling
from worker.attempts import Attempt, Attempts, Outcome, Task
from worker.intake import tiers_with_room
from worker.lease import Lease, Watchdog
from worker.logprobs import Speller
from worker.metrics import WorkerMetrics, of_rank
from worker.progress import ENGINE_ERROR, RETRY_S, ProgressWriter
from worker.vital import vital_thread

logger = logging.getLogger(__name__)

MAX_CLAIMED_AT_ONCE = 256
"""Jobs in one claim; a single message may name fewer, never more."""

ANNOUNCE_TIMEOUT_S = 1.0
"""An announcement may be lost, and must not hold up the writes behind it for longer."""

FLUSH_TIMEOUT_S = 5.0
"""At the end the last writes get so long; what is not written then is computed again elsewhere."""


class Claimer:
    """Claims the jobs of messages in batches, on a thread of its own, and gives them to the engine."""

    def __init__(
        self,
        database: Database,
        client: redis.Redis,
        attempts: Attempts,
        engine: Engine,
        writer: ProgressWriter,
        lease: Lease,
        dispatcher: Dispatcher,
    ) -> None:
        self._database = database
        self._redis = client
        self._attempts = attempts
        self._engine = engine
        self._writer = writer
        self._lease = lease
        self._dispatcher = dispatcher
        self._inbox: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unsubmitted: Counter[Tier] = Counter()
        self._closed = threading.Event()
        self._thread = vital_thread("claimer", self._run)

    def put(self, task: Task) -> None:
        """Claim a message's jobs soon. From any thread; never blocks."""
        with self._lock:
            self._unsubmitted[task.tier] += len(task.dispatch_numbers)
        self._inbox.put(task)

    def unsubmitted(self) -> Counter[Tier]:
        """Jobs of messages that are held here and not yet in the engine's hands."""
        with self._lock:
            return self._unsubmitted.copy()

    def close(self) -> None:
        """End the thread after the claim under way. Messages that are left are not acknowledged: they come again."""
        self._closed.set()
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            tasks = self._next_batch()
            if not tasks:
                continue
            claimed = self._claim(tasks)
            if claimed is None:
                return
            self._begin(tasks, *claimed)
            with self._lock:
                for task in tasks:
                    self._unsubmitted[task.tier] -= len(task.dispatch_numbers)
            self._dispatcher.nudge()

    def _next_batch(self) -> list[Task]:
        """Wait for a message; take what else is there, up to MAX_CLAIMED_AT_ONCE jobs. Empty when closed."""
        batch: list[Task] = []
        num_jobs = 0
        task = self._inbox.get()
        while task is not None:
            batch.append(task)
            num_jobs += len(task.dispatch_numbers)
            if num_jobs >= MAX_CLAIMED_AT_ONCE:
                break
            try:
                task = self._inbox.get_nowait()
            except queue.Empty:
                break
        return batch

    def _claim(self, tasks: Sequence[Task]) -> tuple[str, list[Claim]] | None:
        """Claim, as soon as the database is there; the incarnation that did, and what it got. None when closed before.

        A claim whose reply is lost leaves jobs that are ours and do not run: the lease finds them and hands them back.
        """
        numbers: dict[str, int] = {}
        for task in tasks:
            numbers = {**task.dispatch_numbers, **numbers}  # of two messages for a job, the first one counts
        failures = 0
        while not self._closed.is_set():
            owner = self._lease.owner
            self._attempts.expect(numbers)
            try:
                with self._database.transaction() as session:
                    return owner, claims.claim(session, owner, numbers)
            except SQLAlchemyError as error:
                self._attempts.expect(())
                pause_s = RETRY_S[min(failures, len(RETRY_S) - 1)]
                logger.warning("%d jobs were not claimed, again in %s s: %s", len(numbers), pause_s, error)
                failures += 1
                self._closed.wait(pause_s)
        return None

    def _begin(self, tasks: Sequence[Task], owner: str, claimed: Sequence[Claim]) -> None:
        """Start the attempts; acknowledge the messages; drop the jobs that somebody else has."""
        by_id = {claim.job_id: claim for claim in claimed}
        now = time.monotonic()
        begun = [
            Attempt(by_id.pop(job_id), owner, task, claimed_at=now)
            for task in tasks
            for job_id in task.dispatch_numbers
            if job_id in by_id
        ]
        begun.sort(key=lambda attempt: attempt.task.dispatch_numbers[attempt.claim.job_id])  # the order of dispatch
        self._attempts.add(begun)
        for task in tasks:
            task.on_claimed()
        events.announce(self._redis, claims.started_events(claimed))
        for attempt in begun:
            self._submit(attempt)
        started = Counter(attempt.task for attempt in begun)
        for task in tasks:
            if duplicates := len(task.dispatch_numbers) - started[task]:
                self._attempts.count(task, Outcome.DUPLICATE, duplicates)

    def _submit(self, attempt: Attempt) -> None:
        if attempt.task.is_revoked:
            self._writer.end(attempt, Status.CANCELLED)
            return
        try:
            requests = requests_of(attempt)
            if not requests:  # an earlier attempt brought all choices to their ends, and not the job
                self._writer.end(attempt, Status.SUCCEEDED)
            for request in requests:
                self._engine.submit(request)
        except (TypeError, ValueError) as error:
            logger.error("job %s cannot be given to the engine: %s", attempt.claim.job_id, error)
            self._writer.end(attempt, Status.FAILED, {"code": ENGINE_ERROR, "message": str(error)})
        except EngineStoppedError:
            logger.warning("job %s came too late for the engine and is handed back", attempt.claim.job_id)


def requests_of(attempt: Attempt) -> list[Request]:
    """What the engine is told of a job: a request for each choice that has not ended; they share the prompt's blocks.

    Raises TypeError for sampling fields that the engine does not know.
    """
    claim = attempt.claim
    fields = {name: _frozen(value) for name, value in claim.sampling.items()}
    deadline = time.monotonic() + claim.deadline_s
    return [
        Request(
            id=choice.request_id,
            prompt_ids=claim.prompt_ids,
            sampling=Sampling(**fields, choice=choice.index),
            resumed_ids=begun.token_ids,
            rank=POLICIES[claim.tier].rank,
            tenant=claim.tenant_id,
            weight=claim.weight,
            counter=claim.counter,
            deadline=deadline,
            kind=f"{claim.tenant_id}/{claim.tier}",  # a tenant's jobs of one tier tend to be alike
        )
        for choice, begun in zip(attempt.outputs, claim.begun, strict=True)
        if begun.finish_reason is None
    ]


def _frozen(value: Any) -> Any:
    """JSON's lists as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class JobService:
    """All of a worker but Celery: from `take` on, a message's jobs run to their end and its callbacks are called."""

    def __init__(self, settings: Settings, model: Model, engine: Engine, *, is_ready: Callable[[], bool]) -> None:
        """Start the engine and everything around it; the worker is then alive in Postgres and may take messages.

        is_ready says whether messages are taken, as Postgres is to know. Waits for the database. Settings must name
        both servers.
        """
        assert settings.database_url and settings.redis_url
        self._settings = settings
        self._engine = engine
        self._database = Database(settings.database_url)
        self._redis = redis.Redis.from_url(
            settings.redis_url, socket_timeout=ANNOUNCE_TIMEOUT_S, socket_connect_timeout=ANNOUNCE_TIMEOUT_S
        )
        self._broker = Broker(settings.redis_url)
        self._dispatcher = Dispatcher(self._database, self._broker, model.name)
        self._attempts = Attempts()
        metrics = WorkerMetrics(engine, is_ready)
        self._writer = ProgressWriter(
            self._database,
            self._redis,
            self._attempts,
            engine,
            flush_interval_s=settings.flush_interval_ms / 1000,
            spelled=Speller(model.directory).spelled,
            on_ended=self._dispatcher.nudge,
            metrics=metrics,
        )
        engine.start(self._writer.on_outputs)
        self._metrics_server = MetricsServer(metrics.registry, settings, is_ready=is_ready)
        self._watchdog = Watchdog(engine, patience_s=settings.watchdog_s)
        self._lease = Lease(
            self._database,
            self._redis,
            self._attempts,
            engine,
            self._writer,
            model_name=model.name,
            metrics_url=self._metrics_server.url,
            heartbeat_s=settings.heartbeat_s,
            is_ready=is_ready,
            metrics=metrics,
            on_freed=self._dispatcher.nudge,
        )
        self._claimer = Claimer(
            self._database, self._redis, self._attempts, engine, self._writer, self._lease, self._dispatcher
        )
        self._dispatcher.nudge()

    def take(self, task: Task) -> None:
        """Run the jobs that a message names. From any thread; never blocks."""
        self._claimer.put(task)

    def cancel(self, task: Task) -> None:
        """Cancel what still runs, or is yet to run, of a message's jobs. From any thread; never blocks."""
        task.is_revoked = True
        for attempt in self._attempts.of(task):
            self._writer.end(attempt, Status.CANCELLED)

    def fail(self, task: Task, *, code: str, message: str) -> None:
        """Fail what still runs of a message's jobs. From any thread; never blocks."""
        for attempt in self._attempts.of(task):
            self._writer.end(attempt, Status.FAILED, {"code": code, "message": message})

    def open_tiers(self) -> set[Tier]:
        """The tiers of which another message may be taken."""
        return tiers_with_room(self._engine.stats(), self._claimer.unsubmitted(), self._settings.tiers)

    @property
    def slots(self) -> int:
        return self._engine.stats().slots

    @property
    def is_busy(self) -> bool:
        """Whether jobs run here."""
        return len(self._attempts) > 0

    def facts(self) -> Mapping[str, Any]:
        """The engine at this instant, for `celery inspect stats`."""
        stats = self._engine.stats()
        return {
            "worker": self._lease.owner,
            "slots": stats.slots,
            "running": stats.running,
            "waiting": stats.waiting,
            "steps": stats.steps,
            "preemptions": stats.preemptions,
            "tiers": {
                tier.value: {
                    "running": of_rank(stats.running_by_rank, tier),
                    "waiting": of_rank(stats.waiting_by_rank, tier),
                }
                for tier in Tier
            },
        }

    def stop_taking(self) -> None:
        """Claim nothing more; what runs goes on."""
        self._claimer.close()

    def close(self) -> None:
        """Stop the engine, write what it made, hand back the rest, leave.

        Call stop_taking before. Without a database the lease runs out instead, and the sweep takes the jobs back.
        """
        self._watchdog.close()
        self._engine.close()
        written = self._writer.close(timeout_s=FLUSH_TIMEOUT_S)
        if written:
            self._lease.leave()
        self._dispatcher.close()
        self._metrics_server.close()
        self._broker.close()
        self._redis.close()
        self._database.close()
