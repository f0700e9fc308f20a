"""A job is ordered: what every route does that makes one, and those that wait for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any

from flask import request
from sqlalchemy.orm import Session

from app import choices, events, jobs, programs, submissions
from app.api.auth import tenant
from app.api.services import Services, services
from app.choices import Choice
from app.errors import Conflict, NotFound
from app.jobs import Idempotency, Submitted
from app.submissions import JobRequest
from app.tables import Job
from app.tiers import Plan

_LOOK_S = 1.0
"""How often it is looked whether a client that waits is still there."""


def order(
    wanted: JobRequest, *, idempotency: Idempotency | None = None, asked: Mapping[str, Any] | None = None
) -> Submitted:
    """The durable job of a request, new or made before by the same Idempotency-Key. Raises Refusal."""
    own = services()
    parents = None
    if named := wanted.named_parents:
        with own.database.autocommit() as session:
            if idempotency is not None and (made := jobs.made_before(session, tenant().id, idempotency)) is not None:
                return made  # its parents may be gone by now
            parents = programs.parents_of(session, tenant().id, named)
    submission = submissions.to_submission(
        wanted,
        plan=Plan(tenant().plan),
        model=own.model,
        prompts=own.prompts,
        grammars=own.grammars,
        settings=own.settings,
        asked=asked,
        parents=parents,
    )
    submitted = own.reception.submit(tenant().id, submission, idempotency)
    if submitted.is_new:
        own.metrics.submitted.labels(submission.tier.value).inc()
        own.dispatcher.nudge()
    return submitted


def wait_for_end(job_id: str, *, seconds: float, is_wanted: Callable[[], bool] = lambda: True) -> bool:
    """Wait until the job has ended; False when it has not by then, when nobody wants it, or as the server stops.

    Raises Unavailable where all places of those that wait, or follow a stream, are taken.
    """
    own = services()
    leave = own.streams.enter()
    give_up = time.monotonic() + seconds
    try:
        with closing(events.follow(own.database, own.hub, job_id, 0, heartbeat_s=min(_LOOK_S, seconds))) as log:
            looked_at = time.monotonic()
            for event in log:
                if event is not None and event.ends_log:
                    return True
                now = time.monotonic()
                if now >= give_up or (now - looked_at >= _LOOK_S and not is_wanted()):
                    return False
                looked_at = max(looked_at, now - _LOOK_S)
        return False
    finally:
        leave()


def client_probe() -> Callable[[], bool]:
    """Tells whether the client of the current request is still connected, where the server lets that be seen."""
    connection: socket.socket | None = request.environ.get("gunicorn.socket")

    def is_there() -> bool:
        if connection is None:
            return True
        try:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except (BlockingIOError, ValueError):  # the latter from a socket with TLS
            return True
        except OSError:
            return False

    return is_there


def give_up(own: Services, tenant_id: str, job_id: str) -> None:
    """Cancel a job that nobody waits for any more, unless it has ended."""
    with suppress(Conflict, NotFound):
        with own.database.transaction() as session:
            moved = jobs.cancel(session, tenant_id, job_id)[1]
        own.publish(moved)
        own.dispatcher.nudge()


def with_choices(session: Session, job_id: str) -> tuple[Job, list[Choice]]:
    """The tenant's job as it stands, with its outputs. Raises NotFound."""
    job = jobs.find(session, tenant().id, job_id)
    jobs.add_progress(session, [job])
    return job, choices.of_one(session, job)
