"""What an API process counts."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from app.db import Database
from app.metrics import Counts, Shares


class Metrics:
    """The metrics of one process, in a registry of their own."""

    def __init__(self, database: Database, model: str, open_streams: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.submitted = Counter("everbatch_jobs_submitted", "Jobs accepted.", ["tier"], registry=self.registry)
        self.refusals = Counter(
            "everbatch_refusals", "Requests refused, by the code in the answer.", ["code"], registry=self.registry
        )
        self.request_seconds = Histogram(
            "everbatch_http_request_seconds",
            "From a request's arrival to its answer's headers, in seconds.",
            ["method", "route"],
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=self.registry,
        )
        streams = Gauge("everbatch_open_streams", "Event streams being served.", registry=self.registry)
        streams.set_function(open_streams)
        self.registry.register(Counts(database))
        self.registry.register(Shares(database, model))
