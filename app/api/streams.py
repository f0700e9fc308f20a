"""How many event streams a process serves at once: each holds a thread for as long as its client listens."""

from __future__ import annotations

import threading
from collections.abc import Callable

from app.errors import Unavailable
from app.settings import Settings

RESERVED_THREADS = 32
"""Threads that streams leave to all other requests."""


class Streams:
    """Counts open streams and refuses those beyond the limit."""

    def __init__(self, settings: Settings) -> None:
        self.limit = max(1, settings.api_threads - RESERVED_THREADS)
        self._open = 0
        self._is_closing = False
        self._lock = threading.Lock()

    @property
    def open(self) -> int:
        return self._open

    def enter(self) -> Callable[[], None]:
        """Take a place and return what gives it back, which may be called twice. Raises Unavailable without a place."""
        with self._lock:
            if self._is_closing:
                raise Unavailable("This server is about to stop")
            if self._open >= self.limit:
                raise Unavailable(f"All {self.limit} event streams of this server are taken")
            self._open += 1
        return _Once(self._leave)

    def close(self) -> None:
        """Refuse further streams."""
        self._is_closing = True

    def _leave(self) -> None:
        with self._lock:
            self._open -= 1


class _Once:
    """Calls what it was given at its first call only."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()
