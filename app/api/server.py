"""gunicorn's threaded worker, taught to end event streams when it is asked to stop.

gunicorn "app.api:create_app()" --worker-class app.api.server.Worker --threads 256
"""

from __future__ import annotations

import sys
from typing import Any

from flask import Flask
from gunicorn.arbiter import Arbiter
from gunicorn.workers.gthread import ThreadWorker

from app import logs
from app.api.services import PerProcess
from app.errors import SetupError


class Worker(ThreadWorker):  # type: ignore[misc]
    """One API process. With gunicorn's own, streams hold up each stop for the whole graceful timeout and then break."""

    def load_wsgi(self) -> None:
        """Load the application and open its services, before the first request comes."""
        logs.setup("api")
        logs.adopt("gunicorn.error")
        try:
            super().load_wsgi()
            self._services().get()
        except (SetupError, OSError) as error:
            sys.stderr.write(f"{error}\n")
            sys.exit(Arbiter.APP_LOAD_ERROR)  # tells gunicorn not to try again

    def handle_exit(self, signal: int, frame: Any) -> None:
        """On SIGTERM: take no more requests, end the streams, finish what is short."""
        super().handle_exit(signal, frame)
        if self.booted:
            self._services().get().end_streams()

    def _services(self) -> PerProcess:
        app: Flask = self.wsgi
        services: PerProcess = app.extensions["everbatch"]
        return services
