"""The task of the io worker: post one webhook."""

from __future__ import annotations

from app.broker import DELIVER
from worker import webhooks
from worker.celery_app import io
from worker.clock import services


@io.task(name=DELIVER, shared=False)  # type: ignore[untyped-decorator]
def deliver(delivery_id: str, attempt: int) -> None:
    opened = services()
    outcome = webhooks.deliver(opened.database, opened.vault, opened.settings, delivery_id, attempt)
    if outcome is not None:
        opened.metrics.posts.labels("delivered" if outcome.is_delivered else "failed").inc()
