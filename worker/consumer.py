"""Whether this process takes messages, and what becomes of it when it does not.

After faults of Redis a consumer may hang for ever, or say that it is connected and ask for nothing any more, while the
rest of its process is well. Such a worker is not ready, and where Redis answers others, it ends, to be started again.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

from celery.worker import consumer

from app.broker import answers
from worker.vital import vital_thread

logger = logging.getLogger(__name__)

RECONNECT_S = 2.0
"""The longest pause between two tries to connect, after half a second at first. Celery's own grows to 30 s."""
TURN_S = 3.0
"""Asked again within so long, the broker has answered: longer than it holds a question (1 s for the io worker's), and
shorter than kombu waits for the answer (4 s)."""
READY_S = 10.0
"""A consumer that made no turn for so long takes nothing: its worker is not ready."""
LEAVE_S = 15.0
"""While Redis answered for so long, a consumer that is well would have turned: its worker ends. Longer than what kombu
needs to drop a connection that is dead, or to find that a new one is."""
PROBE_TIMEOUT_S = 2.0


class Consumption:
    """What the consumer of this process does; the thread of Celery's hub writes it, others read."""

    turns: ClassVar[int] = 0
    """How often the consumer went round: once a second at least, also while nobody has room or nothing comes."""
    connections: ClassVar[int] = 0
    """Connections that were made to consume by."""
    _asked_at: ClassVar[float] = -math.inf

    @classmethod
    def note_ask(cls) -> None:
        """The transport is about to read queues, or to find that none may be read.

        Where it did so a moment ago, the broker has answered since. One that does not answer is asked again only once
        kombu has given up the connection.
        """
        now = time.monotonic()
        if now - cls._asked_at < TURN_S:
            cls.turns += 1
        cls._asked_at = now


class Consumer(consumer.Consumer):  # type: ignore[misc]
    """Celery's, which tries soon again to connect, for as long as it takes."""

    def connect(self) -> Any:
        connection = super().connect()
        Consumption.connections += 1
        return connection

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Let go of a connection that was lost.

        kombu would put messages that are not acknowledged back through a connection that Celery has just taken apart,
        and the AttributeError of that would end the worker. They are in the pool's hands, and come again as duplicates.
        """
        for channel in self.connection.transport.channels:
            channel.do_restore = False
        super().on_connection_error_after_connected(exc)

    def ensure_connected(self, conn: Any) -> Any:
        conn.ensure_connection = functools.partial(
            conn.ensure_connection, interval_start=0.5, interval_step=0.5, interval_max=RECONNECT_S
        )
        return super().ensure_connected(conn)


class ConsumerWatch:
    """Notices a consumer that does not turn."""

    TICK_S = 0.5

    def __init__(self, redis_url: str, *, leave: Callable[[], None]) -> None:
        """leave is called once, on the watch's thread, when the process should end; it may take its time."""
        self._redis_url = redis_url
        self._leave = leave
        self._silent_s = 0.0
        self._closed = threading.Event()

    def start(self) -> None:
        """Watch from now on: the consumer is about to start."""
        vital_thread("consumer watch", self._run)

    @property
    def is_ready(self) -> bool:
        """Whether messages are taken."""
        return self._silent_s < READY_S and not self._closed.is_set()

    def close(self) -> None:
        """The worker takes nothing more, and that is well."""
        self._closed.set()

    def _run(self) -> None:
        last_turn, redis_s, looked_at = -1, 0.0, time.monotonic()
        while not self._closed.wait(self.TICK_S):
            # No more than a look may take: a process that was stopped for a while did not hang.
            passed_s = min(time.monotonic() - looked_at, self.TICK_S + 2 * PROBE_TIMEOUT_S)
            looked_at = time.monotonic()
            turn, was_ready = Consumption.turns, self.is_ready
            if turn != last_turn:
                if not was_ready:
                    logger.info("the consumer takes messages again")
                last_turn, self._silent_s, redis_s = turn, 0.0, 0.0
                continue
            self._silent_s += passed_s
            if was_ready and not self.is_ready:
                logger.warning("no message could come in %s s: this worker is not ready", READY_S)
            redis_s = redis_s + passed_s if answers(self._redis_url, PROBE_TIMEOUT_S) else 0.0
            if redis_s >= LEAVE_S:
                logger.critical("Redis answers, and the consumer has not asked it in %s s: this worker ends", redis_s)
                self._leave()
                return
