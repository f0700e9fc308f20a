"""The numbered event log of a job: append, announce, replay, follow.

Persist first, then announce: only rows that the database accepted are published, so what is live, what is replayed and
what is stored are the same rows with the same boundaries. Redis may lose an announcement; a follower that meets a hole
reads the rows.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import redis
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from app import logprobs, tables
from app.db import Database

logger = logging.getLogger(__name__)

TOKENS = "tokens"
TERMINAL = frozenset({"succeeded", "failed", "cancelled", "expired"})
"""Kinds that end a job's log: the terminal statuses."""

POLL_S = 2.0
"""A follower that heard nothing for so long reads the rows: announcements can be lost."""
BACKLOG = 1000
"""Announcements kept for a slow reader; beyond it he reads the rows instead."""
PAGE = 500
"""Rows read at once."""


@dataclass(frozen=True, slots=True)
class Event:
    """A fact about a job, as it is shown."""

    job_id: str
    number: int
    kind: str
    data: dict[str, Any]

    @property
    def ends_log(self) -> bool:
        return self.kind in TERMINAL


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of a running job, not yet persisted."""

    job_id: str
    attempt: int
    number: int
    """The event number that it shall have: the one after the last that this attempt knows of."""
    text: str
    token_ids: tuple[int, ...]
    choice: int = 0
    """The index of the job's choice that they belong to."""
    finish_reason: str | None = None
    """With the last tokens of a choice."""
    logprobs: bytes | None = None
    """Of each token, packed, where the job wants them."""


def shown(row: tables.Event) -> Event:
    """The event as clients see it: text of tokens, data of everything else; never token ids."""
    data = dict(row.data or {})
    if row.kind == TOKENS:
        data = _tokens(row.choice, row.text or "", data.get("finish_reason"), row.logprobs)
    return Event(job_id=row.job_id, number=row.number, kind=row.kind, data=data)


def _tokens(choice: int, text: str, finish_reason: str | None, packed: bytes | None) -> dict[str, Any]:
    """The data of tokens."""
    data: dict[str, Any] = {"index": choice, "text": text}
    if finish_reason is not None:
        data["finish_reason"] = finish_reason
    if packed is not None:
        data["logprobs"] = logprobs.chat_shape(logprobs.unpack(packed))
    return data


_APPEND = text(
    """
    insert into events (job_id, number, kind, choice, text, token_ids, data, logprobs)
    select v.job_id, v.number, 'tokens', v.choice, v.text, string_to_array(v.token_ids, ',')::int[],
        case when v.finish_reason is not null then jsonb_build_object('finish_reason', v.finish_reason) end, v.logprobs
    from unnest(cast(:job_ids as text[]), cast(:attempts as int[]), cast(:numbers as int[]), cast(:choices as int[]),
                cast(:texts as bytea[]), cast(:token_ids as text[]), cast(:finish_reasons as text[]),
                cast(:logprobs as bytea[]))
         as v (job_id, attempt, number, choice, text, token_ids, finish_reason, logprobs)
    join jobs on jobs.id = v.job_id
    where jobs.status = 'running' and jobs.attempt = v.attempt and jobs.owner = :owner
    order by jobs.id
    for share of jobs
    on conflict do nothing
    returning job_id, number
    """
)
"""One statement for all running jobs of a worker. The join and the primary key are the fence; the share lock, taken in
the order of ids like all others, makes a concurrent move wait, so that it sees the number that was taken here."""


def append_tokens(session: Session, owner: str, deltas: Sequence[Delta]) -> list[Event]:
    """Persist new tokens of the jobs that owner still runs; return the accepted ones as events.

    What is not returned is neither stored nor shown: its job was cancelled, ended, or given to somebody else.
    """
    if not deltas:
        return []
    accepted = {
        (row.job_id, row.number)
        for row in session.connection().execute(  # no entities: the session's own execute would cost as much again
            _APPEND,
            {
                "owner": owner,
                "job_ids": [delta.job_id for delta in deltas],
                "attempts": [delta.attempt for delta in deltas],
                "numbers": [delta.number for delta in deltas],
                "choices": [delta.choice for delta in deltas],
                "texts": [delta.text.encode() for delta in deltas],
                "token_ids": [",".join(map(str, delta.token_ids)) for delta in deltas],
                "finish_reasons": [delta.finish_reason for delta in deltas],
                "logprobs": [delta.logprobs for delta in deltas],
            },
        )
    }
    return [
        Event(
            job_id=delta.job_id,
            number=delta.number,
            kind=TOKENS,
            data=_tokens(delta.choice, delta.text, delta.finish_reason, delta.logprobs),
        )
        for delta in deltas
        if (delta.job_id, delta.number) in accepted
    ]


def last_number(session: Session, job_id: str) -> int:
    """The number of the job's last event so far."""
    return session.scalar(select(func.max(tables.Event.number)).where(tables.Event.job_id == job_id)) or 0


def replay(session: Session, job_id: str, after: int, *, limit: int = PAGE) -> list[Event]:
    """The job's events with numbers above after, in order, at most limit of them."""
    rows = session.scalars(
        select(tables.Event)
        .where(tables.Event.job_id == job_id, tables.Event.number > after)
        .order_by(tables.Event.number)
        .limit(limit)
    )
    return [shown(row) for row in rows]


def channel(job_id: str) -> str:
    return f"everbatch:events:{job_id}"


def announce(client: redis.Redis, events: Sequence[Event]) -> None:
    """Publish committed events. Losing them is allowed: followers read the rows when they meet a hole."""
    if not events:
        return
    try:
        with client.pipeline(transaction=False) as pipe:
            for event in events:
                pipe.publish(channel(event.job_id), json.dumps([event.number, event.kind, event.data]))
            pipe.execute()
    except redis.RedisError as error:
        logger.warning("%d events were not announced: %s", len(events), error)


@dataclass(eq=False)
class _Listener:
    """One follower's mailbox. One that is full drops its oldest: the follower meets the hole and reads the rows."""

    mailbox: queue.Queue[Event | None] = field(default_factory=lambda: queue.Queue(BACKLOG))
    """None wakes the follower and says nothing."""

    def put(self, event: Event | None) -> None:
        while True:
            try:
                return self.mailbox.put_nowait(event)
            except queue.Full:
                with suppress(queue.Empty):
                    self.mailbox.get_nowait()


def _pubsub(client: redis.Redis) -> Any:
    return client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]


class Hub:
    """One Redis subscriber for all followers of a process, subscribed to the followed jobs only."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._listeners: dict[str, set[_Listener]] = defaultdict(set)
        self._lock = threading.Lock()
        self._pubsub = _pubsub(client)
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="event-hub", daemon=True)
        self._thread.start()

    @property
    def followers(self) -> int:
        with self._lock:
            return sum(map(len, self._listeners.values()))

    def join(self, job_id: str) -> _Listener:
        listener = _Listener()
        with self._lock:
            self._listeners[job_id].add(listener)
            if len(self._listeners[job_id]) == 1:
                self._command(self._pubsub.subscribe, channel(job_id))
        self._wanted.set()
        return listener

    def leave(self, job_id: str, listener: _Listener) -> None:
        with self._lock:
            self._listeners[job_id].discard(listener)
            if not self._listeners[job_id]:
                del self._listeners[job_id]
                self._command(self._pubsub.unsubscribe, channel(job_id))

    @property
    def is_released(self) -> bool:
        return self._released.is_set()

    def release(self) -> None:
        """End what follows through this hub, now and later, wherever it stands. A signal handler may call it."""
        self._released.set()
        with self._lock:
            listeners = [listener for followers in self._listeners.values() for listener in followers]
        for listener in listeners:
            listener.put(None)

    def close(self) -> None:
        self.release()
        self._closed.set()
        self._wanted.set()
        self._thread.join(5)
        self._pubsub.close()

    def _command(self, command: Any, name: str) -> None:
        """Subscribe or unsubscribe. Without Redis this fails; the listening thread subscribes again once it is back."""
        try:
            command(name)
        except redis.RedisError as error:
            logger.warning("the event hub lost Redis: %s", error)

    def _listen(self) -> None:
        while not self._closed.is_set():
            if not self._wanted.wait(1.0):
                continue
            try:
                if not self._pubsub.subscribed:
                    self._resubscribe()
                    continue
                message = self._pubsub.get_message(timeout=1.0)
            except (redis.RedisError, OSError, ValueError) as error:
                logger.warning("the event hub lost Redis: %s", error)
                self._closed.wait(0.5)
                self._reconnect()
                continue
            if message is not None:
                self._deliver(message)

    def _resubscribe(self) -> None:
        with self._lock:
            if self._listeners:
                self._pubsub.subscribe(*map(channel, self._listeners))
            else:
                self._wanted.clear()

    def _reconnect(self) -> None:
        """A fresh connection: what was missed meanwhile the followers read from the rows."""
        with self._lock:
            self._pubsub.close()
            self._pubsub = _pubsub(self._client)

    def _deliver(self, message: dict[str, Any]) -> None:
        job_id = message["channel"].decode().removeprefix(channel(""))
        number, kind, data = json.loads(message["data"])
        event = Event(job_id=job_id, number=number, kind=kind, data=data)
        with self._lock:
            listeners = list(self._listeners.get(job_id, ()))
        for listener in listeners:
            listener.put(event)


def follow(
    database: Database, hub: Hub, job_id: str, after: int, *, heartbeat_s: float, poll_s: float = POLL_S
) -> Generator[Event | None]:
    """The job's events with numbers above after, each once, in order, as they come, up to the terminal one.

    Yields None when nothing came for heartbeat_s. Ends also when the job was deleted or the hub released. No database
    connection is held between events. Subscribes first, then reads the rows, so that nothing falls between the two.
    """
    listener = hub.join(job_id)
    try:
        last, quiet_since = after, time.monotonic()
        while not hub.is_released:
            page, exists = _read(database, job_id, last)
            for event in page:
                yield event
                last, quiet_since = event.number, time.monotonic()
                if event.ends_log:
                    return
            if len(page) == PAGE:
                continue
            if not exists:
                return
            read_at = time.monotonic()
            while time.monotonic() - read_at < poll_s:
                live = _next(listener, timeout_s=min(poll_s, heartbeat_s))
                if time.monotonic() - quiet_since >= heartbeat_s:  # also while only old news come
                    yield None
                    quiet_since = time.monotonic()
                if live is None:
                    if hub.is_released:
                        return
                elif live.number > last + 1:
                    break  # a hole: read the rows
                elif live.number == last + 1:
                    yield live
                    last, quiet_since = live.number, time.monotonic()
                    read_at = quiet_since
                    if live.ends_log:
                        return
    finally:
        hub.leave(job_id, listener)


def _next(listener: _Listener, *, timeout_s: float) -> Event | None:
    try:
        return listener.mailbox.get(timeout=timeout_s)
    except queue.Empty:
        return None


def _read(database: Database, job_id: str, after: int) -> tuple[list[Event], bool]:
    """A page of rows, and whether more may come: False once the job is gone, or its log has ended before after."""
    with database.autocommit() as session:
        status = session.scalar(select(tables.Job.status).where(tables.Job.id == job_id))
        page = replay(session, job_id, after)  # behind the status: what ended the job by then is in the rows
    return page, bool(page) or (status is not None and status not in TERMINAL)
