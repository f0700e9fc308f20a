"""A client that stays connected to one job while things happen to the service."""

from __future__ import annotations

import threading
import time

from app.cli.demo.narrator import Failed
from app.client import Client, ClientError, Event, Job


class Follower:
    """Follows a job from its first event on, on a thread of its own."""

    def __init__(self, client: Client, job: Job) -> None:
        self.job = job
        self._client = client
        self._arrivals: list[tuple[float, Event]] = []
        self._problem: ClientError | None = None
        self._thread = threading.Thread(target=self._follow, name=f"follower-{job['id']}", daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        """What has come so far, joined."""
        return "".join(event.data["text"] for _, event in list(self._arrivals) if event.kind == "tokens")

    def text_of_attempt_came(self, attempt: int) -> float | None:
        """When the first text of an attempt came, by time.monotonic(); None if there was none."""
        running = 0
        for at, event in list(self._arrivals):
            running = event.data["attempt"] if event.kind == "running" else running
            if event.kind == "tokens" and running == attempt:
                return at
        return None

    def finish(self, patience_s: float) -> Job:
        """The job as the API tells it, once its stream has ended. Raises Failed, or what ended the stream early."""
        self._thread.join(patience_s)
        if self._problem is not None:
            raise self._problem
        if self._thread.is_alive():
            raise Failed(f"{self.job['id']} did not end within {patience_s:.0f} s")
        return self._client.get(self.job["id"])

    def _follow(self) -> None:
        try:
            for event in self._client.events(self.job["id"]):
                self._arrivals.append((time.monotonic(), event))
        except ClientError as error:
            self._problem = error
