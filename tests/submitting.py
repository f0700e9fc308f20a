"""One job, as the API submits several that come at once."""

from __future__ import annotations

from sqlalchemy.orm import Session

from app import jobs
from app.errors import Refusal
from app.jobs import Idempotency, Order, Submission
from app.tables import Job


def submit(
    session: Session,
    tenant_id: str,
    submission: Submission,
    *,
    max_queued: int,
    idempotency: Idempotency | None = None,
) -> tuple[Job, bool]:
    """The job, and whether it is new. Raises its refusal."""
    (outcome,) = jobs.submit(session, tenant_id, [Order(submission, idempotency)], max_queued=max_queued)
    if isinstance(outcome, Refusal):
        raise outcome
    return outcome.job, outcome.is_new
