"""/v1/jobs: submit, read, list, cancel, delete."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from flask import Blueprint, Response, jsonify, request, url_for

from app import choices, jobs, submissions, waiting
from app.api import shapes
from app.api.auth import authenticate, tenant
from app.api.bodies import read_object
from app.api.idempotency import idempotency_of
from app.api.operations import described
from app.api.orders import order, wait_for_end, with_choices
from app.api.pages import asked_page, checked_id, listing, page_query
from app.api.services import services
from app.choices import Choice
from app.errors import InvalidRequest
from app.logprobs import chat_shape
from app.moves import Status
from app.settlements import usage_of
from app.submissions import JobRequest
from app.tables import Job
from app.waiting import Wait

blueprint = Blueprint("jobs", __name__, url_prefix="/v1/jobs")
blueprint.before_request(authenticate)

_WAIT = re.compile(r'(?:^|[,;])\s*wait\s*=\s*"?([0-9]{1,6})"?\s*(?:$|[,;])')
_PAGE = 20
_MAX_PAGE = 100


@blueprint.post("")
@described(body=JobRequest, headers={"Idempotency-Key": str, "Prefer": str}, answers={202: shapes.Job, 200: shapes.Job})
def submit() -> Response:
    """202 means that the job is durable: its row was committed before this answer.

    With `Prefer: wait=60` the answer comes when the job has ended, as a 200, or after so many seconds.
    """
    own = services()
    seconds = _preferred_wait_s()
    body = read_object()
    submitted = order(submissions.parse(body), idempotency=idempotency_of(body))
    has_ended = seconds is not None and wait_for_end(submitted.job.id, seconds=seconds)
    if submitted.is_new and seconds is None:
        shown = job_object(submitted.job, [Choice(index) for index in range(submitted.job.num_choices)])
    else:
        with own.database.autocommit() as session:
            shown = job_object(*with_choices(session, submitted.job.id))
    answer = jsonify(shown)
    answer.status_code = 200 if has_ended else 202
    if seconds is not None:
        answer.headers["Preference-Applied"] = f"wait={seconds}"
    answer.headers["Location"] = url_for("jobs.read", job_id=submitted.job.id)
    if not submitted.is_new:
        answer.headers["Idempotent-Replayed"] = "true"
    return answer


@blueprint.get("")
@described(query={**page_query("job", max_limit=_MAX_PAGE), "status": Status}, answers={200: shapes.Jobs})
def list_jobs() -> Response:
    """The tenant's jobs, newest first; logprobs come with a job that is read alone."""
    page = asked_page("job", limit=_PAGE, max_limit=_MAX_PAGE)
    status = _status(request.args.get("status"))
    with services().database.autocommit() as session:
        found = jobs.page(session, tenant().id, after=page.after, limit=page.to_fetch, status=status)
        jobs.add_progress(session, found[: page.limit])
        told = choices.of(session, found[: page.limit], with_logprobs=False)
    return listing(found, page, lambda job: job_object(job, told[job.id]))


@blueprint.get("/<job_id>")
@described(answers={200: shapes.Job})
def read(job_id: str) -> Response:
    """The job, with the text so far."""
    with services().database.autocommit() as session:
        job = jobs.find(session, tenant().id, checked_id("job", job_id))
        jobs.add_progress(session, [job])
        shown = job_object(job, choices.of_one(session, job))
        if job.status == Status.QUEUED:
            shown["queue"] = _wait_object(waiting.wait_of(session, job))
        return jsonify(shown)


@blueprint.delete("/<job_id>")
@described(answers={200: shapes.DeletedJob})
def delete(job_id: str) -> Response:
    """Cancel the job if it has not ended, and forget it."""
    with services().database.transaction() as session:
        moved = jobs.remove(session, tenant().id, checked_id("job", job_id))
    services().publish(moved)
    return jsonify(id=job_id, object="job", deleted=True)


@blueprint.post("/<job_id>/cancel")
@described(answers={200: shapes.Job})
def cancel(job_id: str) -> Response:
    """From the commit on no further token is shown or charged. A body is ignored: clients send an empty one."""
    with services().database.transaction() as session:
        job, moved = jobs.cancel(session, tenant().id, checked_id("job", job_id))
        shown = job_object(job, choices.of_one(session, job))
    services().publish(moved)
    services().dispatcher.nudge()
    return jsonify(shown)


def job_object(job: Job, its_choices: Sequence[Choice]) -> dict[str, Any]:
    """A job as clients see it. While it runs, its output and usage are those so far: see jobs.add_progress."""
    return {
        "id": job.id,
        "object": "job",
        "status": job.status,
        "tier": job.tier,
        "model": job.model,
        "attempt": job.attempt,
        "created_at": _time(job.created_at),
        "started_at": _time(job.started_at),
        "finished_at": _time(job.finished_at),
        "output": {"choices": [_choice_object(choice) for choice in its_choices]},
        "usage": usage_of(job),
        "error": job.error,
        "metadata": job.job_metadata,
    }


def _choice_object(choice: Choice) -> dict[str, Any]:
    shown: dict[str, Any] = {"index": choice.index, "text": choice.text, "finish_reason": choice.finish_reason}
    if choice.logprobs is not None:
        shown["logprobs"] = chat_shape(choice.logprobs)
    return shown


def _wait_object(wait: Wait) -> dict[str, Any]:
    """What a job waits for, as clients see it."""
    return {
        "position": wait.position,
        "estimated_start_at": _time(wait.estimated_start),
        "reason": wait.reason,
    }


def _time(moment: datetime | None) -> str | None:
    """RFC 3339 in UTC, to the microsecond."""
    if moment is None:
        return None
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _preferred_wait_s() -> int | None:
    """How long the client would wait for the job's end, no longer than it may; RFC 7240. None: not at all."""
    asked = _WAIT.search(request.headers.get("Prefer", ""))
    return None if asked is None else min(int(asked[1]), int(services().settings.max_wait_s))


def _status(value: str | None) -> Status | None:
    if value is None:
        return None
    try:
        return Status(value)
    except ValueError:
        raise InvalidRequest(f"status must be one of {', '.join(Status)}", param="status") from None
