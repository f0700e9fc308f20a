"""A webhook receiver as a customer would write one: it believes what the signature proves, and nothing else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import standardwebhooks

_LARGEST_BODY = 65_536


@dataclass(frozen=True)
class Received:
    """One POST as it came, yet to be verified."""

    headers: dict[str, str]
    body: bytes

    def verified(self, secret: str) -> dict[str, Any] | None:
        """The event, or None when the signature does not prove it."""
        try:
            event: dict[str, Any] = standardwebhooks.Webhook(secret).verify(self.body, self.headers)
        except standardwebhooks.WebhookVerificationError:
            return None
        return event

    def with_body(self, body: bytes) -> Received:
        """The same POST with another body."""
        return replace(self, body=body)


@dataclass(frozen=True)
class Receiver:
    url: str
    inbox: queue.Queue[Received]


@contextmanager
def receiver() -> Iterator[Receiver]:
    """A local HTTP server that takes webhooks for as long as the block runs."""
    inbox: queue.Queue[Received] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = min(int(self.headers.get("Content-Length", 0)), _LARGEST_BODY)
            headers = {name.lower(): value for name, value in self.headers.items()}
            inbox.put(Received(headers, self.rfile.read(length)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing: the demo tells what came."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="webhook-receiver", daemon=True)
    thread.start()
    try:
        yield Receiver(f"http://127.0.0.1:{server.server_port}/everbatch", inbox)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
