"""What the demo claims is read here: from the engine worker's metrics, and by SQL from Postgres."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from app.client import TERMINAL
from app.tables import ModelText, Worker
from app.tiers import Tier

_EVERY_S = 0.2
"""Between two readings."""


@dataclass(frozen=True)
class Reading:
    """The engine worker at one instant; counters run from its process's start."""

    at: float
    """Seconds, by the clock of the reader."""
    running: dict[Tier, int]
    """Jobs in the running batch."""
    slots: int
    steps: int
    slot_steps: int
    """Jobs computed, summed over steps."""
    generated_tokens: int
    recomputed_tokens: int
    """Prefilled again, after a preemption or a death."""
    preemptions: int

    @property
    def is_full(self) -> bool:
        return sum(self.running.values()) == self.slots

    @property
    def has_all_tiers(self) -> bool:
        return all(self.running[tier] for tier in Tier)


def read_worker(url: str, at: float) -> Reading:
    """One scrape of a worker's /metrics. Raises httpx.HTTPError when it does not answer."""
    answer = httpx.get(url, timeout=5, trust_env=False).raise_for_status()
    samples = {
        (sample.name, sample.labels.get("tier")): int(sample.value)
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name.startswith("everbatch_") and "le" not in sample.labels
    }
    return Reading(
        at=at,
        running={tier: samples["everbatch_running", tier.value] for tier in Tier},
        slots=samples["everbatch_slots", None],
        steps=samples["everbatch_steps_total", None],
        slot_steps=samples["everbatch_slot_steps_total", None],
        generated_tokens=sum(samples.get(("everbatch_generated_tokens_total", tier.value), 0) for tier in Tier),
        recomputed_tokens=samples["everbatch_recomputed_tokens_total", None],
        preemptions=samples["everbatch_preemptions_total", None],
    )


@dataclass
class Recorder:
    """Readings taken again and again on a thread of its own."""

    readings: list[Reading] = field(default_factory=list)

    def find(self, wanted: Callable[[Reading], bool]) -> Reading | None:
        return next(filter(wanted, list(self.readings)), None)

    def busy_phase(self) -> tuple[Reading, Reading] | None:
        """The first and the last reading with every slot taken; None when there were no two."""
        full = [reading for reading in list(self.readings) if reading.is_full]
        return (full[0], full[-1]) if len(full) > 1 else None


@contextmanager
def recorder(take: Callable[[], Reading | None]) -> Iterator[Recorder]:
    """Record for as long as the block runs; take returns None where there is nothing to read."""
    recorded, stop = Recorder(), threading.Event()

    def record() -> None:
        while not stop.wait(_EVERY_S):
            reading = take()
            if reading is not None:
                recorded.readings.append(reading)

    thread = threading.Thread(target=record, name="recorder", daemon=True)
    thread.start()
    try:
        yield recorded
    finally:
        stop.set()
        thread.join()


@dataclass(frozen=True)
class Persisted:
    """A job as its rows in Postgres tell it."""

    job_id: str
    status: str
    tier: str
    attempt: int
    tokens: tuple[int, ...]
    """Tokens persisted by each attempt, the first attempt's first."""
    completion_tokens: int
    output_text: str
    joined_text: str
    """Of its events, in order."""
    numbers_are_whole: bool
    """Its event numbers are 1..n, and its last event alone is a terminal one."""

    @property
    def has_ended(self) -> bool:
        return self.status in TERMINAL


_JOBS = text(
    """
    select jobs.id, jobs.status, jobs.tier, jobs.attempt, jobs.completion_tokens, jobs.output_text, logs.*
    from jobs
    join lateral (
        select string_agg(coalesce(text, ''::bytea), ''::bytea order by number) as joined_text,
               array_agg(number order by number) as numbers,
               array_agg(kind order by number) as kinds,
               array_agg(coalesce(cardinality(token_ids), 0) order by number) as tokens
        from events where job_id = jobs.id
    ) as logs on true
    where jobs.id = any(:job_ids) or jobs.batch_id = any(:batch_ids)
    order by jobs.id
    """
).columns(output_text=ModelText, joined_text=ModelText)


def persisted(session: Session, *, job_ids: Sequence[str], batch_ids: Sequence[str]) -> list[Persisted]:
    """These jobs and the rows of these batches, in the order of their ids."""
    rows = session.execute(_JOBS, {"job_ids": list(job_ids), "batch_ids": list(batch_ids)})
    return [
        Persisted(
            job_id=row.id,
            status=row.status,
            tier=row.tier,
            attempt=row.attempt,
            tokens=_by_attempt(row.kinds, row.tokens),
            completion_tokens=row.completion_tokens,
            output_text=row.output_text or "",
            joined_text=row.joined_text,
            numbers_are_whole=_are_whole(row.numbers, row.kinds),
        )
        for row in rows
    ]


def live_worker_pids(session: Session) -> list[int]:
    """Of the engine workers that nobody declared dead."""
    return list(session.scalars(select(Worker.pid).where(Worker.dead.is_(False))))


def worker_metrics_url(session: Session) -> str | None:
    """Of the newest engine worker that nobody declared dead; None where there is none."""
    alive = select(Worker.metrics_url).where(Worker.dead.is_(False))
    return session.scalar(alive.order_by(Worker.started_at.desc()).limit(1))


def _are_whole(numbers: Sequence[int], kinds: Sequence[str]) -> bool:
    ends = [kind in TERMINAL for kind in kinds]
    return list(numbers) == list(range(1, len(numbers) + 1)) and ends == [False] * (len(ends) - 1) + [True]


def _by_attempt(kinds: Sequence[str], tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens of the events behind each `running` event; the terminal event may carry some of its own."""
    attempts: list[int] = []
    for kind, count in zip(kinds, tokens, strict=True):
        if kind == "running":
            attempts.append(0)
        if attempts:
            attempts[-1] += count
    return tuple(attempts)
