"""Prometheus metrics: what every process shares. Labels name tiers and codes, never tenants.

/metrics has a private bind of its own, apart from the API; a worker's answers /readyz there, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from app import shares
from app.db import Database
from app.settings import Settings
from app.tables import NOW, Delivery, Job, Receiver, Worker
from app.tiers import Tier

logger = logging.getLogger(__name__)


class MetricsServer:
    """Answers /metrics on a thread of its own. A port that is taken costs the metrics, not the process."""

    def __init__(
        self, registry: CollectorRegistry, settings: Settings, *, is_ready: Callable[[], bool] | None = None
    ) -> None:
        """With is_ready it answers /readyz as well: 200 while that holds, else 503."""
        self.port: int | None = None
        """Where it listens; None when it could not."""
        self.url: str | None = None
        """Where its metrics are, also written to the log."""
        try:
            self._server, self._thread = start_http_server(settings.metrics_port, settings.metrics_host, registry)
        except OSError as error:
            logger.error("no metrics at %s:%d: %s", settings.metrics_host, settings.metrics_port, error)
            return
        if is_ready is not None:
            self._server.set_app(_with_readiness(make_wsgi_app(registry), is_ready))
        self.port = int(self._server.server_port)
        self.url = f"http://{settings.metrics_host}:{self.port}/metrics"
        logger.info("metrics at %s", self.url)

    def close(self) -> None:
        if self.port is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def _with_readiness(metrics: Callable[..., Any], is_ready: Callable[[], bool]) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/readyz":
            shown: Iterable[bytes] = metrics(environ, start_response)
            return shown
        ready = is_ready()
        start_response("200 OK" if ready else "503 Service Unavailable", [("Content-Type", "application/json")])
        return [b'{"status": "ready"}' if ready else b'{"status": "unready"}']

    return answer


class Counts(Collector):
    """What Postgres knows of work and workers, counted there at each scrape."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Asked at registration: without an answer the database would be."""
        return _families()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Nothing while the database does not answer: a gap in a graph says so better than a zero."""
        try:
            with self._database.transaction() as session:
                unfinished = session.execute(_UNFINISHED).all()
                workers = {row[0]: row[1] for row in session.execute(_WORKERS)}
                deliveries = {row[0]: row[1] for row in session.execute(_DELIVERIES)}
                receivers = {row[0]: row[1] for row in session.execute(_RECEIVERS)}
        except SQLAlchemyError as error:
            logger.warning("nothing was counted for a scrape: %s", type(error).__name__)
            return []
        counts = {(row.status, row.tier): row.number for row in unfinished}
        waits_s = {row.tier: row.oldest_s for row in unfinished if row.status == "queued"}
        jobs, oldest, by_readiness, by_status, failing = families = _families()
        for tier in Tier:
            oldest.add_metric([tier.value], float(waits_s.get(tier.value) or 0))
            for status in ("queued", "running"):
                jobs.add_metric([status, tier.value], counts.get((status, tier.value), 0))
        for ready in (True, False):
            by_readiness.add_metric(["ready" if ready else "unready"], workers.get(ready, 0))
        for status in ("pending", "sending"):
            by_status.add_metric([status], deliveries.get(status, 0))
        for is_paused in (False, True):
            failing.add_metric(["paused" if is_paused else "failing"], receivers.get(is_paused, 0))
        return families


_UNFINISHED = (
    select(
        Job.status,
        Job.tier,
        func.count().label("number"),
        func.extract("epoch", NOW - func.min(Job.created_at).filter(~Job.awaits_parents)).label("oldest_s"),
    )
    .where(Job.status.in_(["queued", "running"]))
    .group_by(Job.status, Job.tier)
)
_WORKERS = select(Worker.ready, func.count()).where(Worker.dead.is_(False)).group_by(Worker.ready)
_DELIVERIES = (
    select(Delivery.status, func.count()).where(Delivery.status.in_(["pending", "sending"])).group_by(Delivery.status)
)


_IS_PAUSED = func.coalesce(Receiver.paused_until > NOW, False)
_RECEIVERS = select(_IS_PAUSED, func.count()).group_by(_IS_PAUSED)


def _families() -> list[GaugeMetricFamily]:
    return [
        GaugeMetricFamily("everbatch_jobs", "Unfinished jobs.", labels=["status", "tier"]),
        GaugeMetricFamily(
            "everbatch_oldest_wait_seconds",
            "Since the submission of the oldest job that waits, by tier; 0: none waits.",
            labels=["tier"],
        ),
        GaugeMetricFamily("everbatch_workers", "Live engine workers, by whether they take jobs.", labels=["state"]),
        GaugeMetricFamily("everbatch_deliveries", "Webhooks that are not delivered yet.", labels=["status"]),
        GaugeMetricFamily(
            "everbatch_webhook_receivers", "Receivers whose last attempt failed: failing, or paused.", labels=["state"]
        ),
    ]


class Shares(Collector):
    """What tiers were served of late and how evenly their tenants were, asked of the database at each scrape."""

    WINDOW_S = 60.0

    def __init__(self, database: Database, model: str) -> None:
        self._database = database
        self._model = model

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Asked at registration: without an answer the database would be."""
        return self._families()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Nothing while the database does not answer; no index of a tier in which fewer than two tenants wait."""
        share, fairness = self._families()
        try:
            with self._database.autocommit() as session:
                served = shares.served(session, self._model, window_s=self.WINDOW_S)
        except SQLAlchemyError as error:
            logger.warning("shares were not counted for a scrape: %s", type(error).__name__)
            return
        for tier, own in shares.by_tier(served).items():
            share.add_metric([tier.value], shares.share(shares.tokens(own), shares.tokens(served)))
            index = shares.fairness_index(own)
            if index is not None:
                fairness.add_metric([tier.value], index)
        yield from (share, fairness)

    def _families(self) -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
        window = f"the last {self.WINDOW_S:.0f} s"
        return (
            GaugeMetricFamily(
                "everbatch_tier_share", f"Share of the tokens that a tier got in {window}.", labels=["tier"]
            ),
            GaugeMetricFamily(
                "everbatch_fairness_index", f"Jain's index of the tenants that wait, over {window}.", labels=["tier"]
            ),
        )
