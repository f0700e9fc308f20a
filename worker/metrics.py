"""What the workers tell Prometheus. Labels by tier, never by tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from app.tiers import POLICIES, Tier
from engine.request import Engine, Output, Stats
from worker.attempts import Attempt, ChoiceOutput, Outcome
from worker.consumer import Consumption

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)


class WorkerMetrics:
    """Counters and histograms of one engine worker. Its engine's numbers are read when Prometheus asks."""

    def __init__(self, engine: Engine, is_ready: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        _show_consumer(self.registry, is_ready)
        tokens = Counter("everbatch_generated_tokens", "Tokens generated, by tier.", ["tier"], registry=self.registry)
        self._ended = Counter(
            "everbatch_attempts_ended", "Attempts that ended here, by outcome.", ["tier", "outcome"],
            registry=self.registry,
        )  # fmt: skip
        first_token = Histogram(
            "everbatch_time_to_first_token_seconds", "From the claim to the first token of a choice.", ["tier"],
            buckets=_FIRST_TOKEN_BUCKETS, registry=self.registry,
        )  # fmt: skip
        inter_token = Histogram(
            "everbatch_inter_token_seconds", "Between two tokens of a choice.", ["tier"],
            buckets=_INTER_TOKEN_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self.strays = Counter(
            "everbatch_strays_handed_back", "Jobs handed back that were this worker's and did not run there.",
            registry=self.registry,
        )  # fmt: skip
        self.failed_beats = Counter(
            "everbatch_failed_heartbeats", "Heartbeats that Postgres did not take.", registry=self.registry
        )
        self.failed_writes = Counter(
            "everbatch_failed_writes", "Writes of progress that Postgres did not take; they are tried again.",
            registry=self.registry,
        )  # fmt: skip
        # Looked up once, not with each token: that costs as much as the counting.
        self._tokens = {tier: tokens.labels(tier.value) for tier in Tier}
        self._first_token = {tier: first_token.labels(tier.value) for tier in Tier}
        self._inter_token = {tier: inter_token.labels(tier.value) for tier in Tier}
        self.registry.register(_EngineCollector(engine))

    def observe(self, attempt: Attempt, choice: ChoiceOutput, output: Output, at: float) -> None:
        """Note an output for an attempt's choice, which left the engine at a moment of time.monotonic()."""
        if not output.token_ids:
            return
        tier = attempt.claim.tier
        self._tokens[tier].inc(len(output.token_ids))
        if choice.last_output_at is None:
            self._first_token[tier].observe(at - attempt.claimed_at)
        else:
            self._inter_token[tier].observe((at - choice.last_output_at) / len(output.token_ids))

    def count_end(self, tier: Tier, outcome: Outcome) -> None:
        self._ended.labels(tier.value, outcome.value).inc()


class IoMetrics:
    """Counters of one io worker."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        _show_consumer(self.registry, is_ready)
        self.failed_rounds = Counter(
            "everbatch_failed_rounds", "Rounds that a server's error ended early, by round.", ["round"],
            registry=self.registry,
        )  # fmt: skip
        self.leads = Gauge("everbatch_sweep_leader", "1 where this process sweeps, else 0.", registry=self.registry)
        self.last_sweep = Gauge(
            "everbatch_last_sweep_timestamp_seconds", "When this process last swept, in Unix seconds; 0: never.",
            registry=self.registry,
        )  # fmt: skip
        self.deaths = Counter(
            "everbatch_workers_declared_dead", "Engine workers whose heartbeat had grown old.", registry=self.registry
        )
        self.requeued = Counter(
            "everbatch_jobs_requeued", "Jobs put back in line because their worker was dead.", registry=self.registry
        )
        self.poison = Counter(
            "everbatch_jobs_poison", "Jobs that failed because too many workers died under them.",
            registry=self.registry,
        )  # fmt: skip
        self.expired = Counter(
            "everbatch_jobs_expired", "Jobs that the sweep ended at their deadline.", registry=self.registry
        )
        self.lost_messages = Counter(
            "everbatch_messages_lost", "Messages found lost at the broker, by tier; their jobs are sent again.",
            ["tier"], registry=self.registry,
        )  # fmt: skip
        self.posts = Counter(
            "everbatch_delivery_attempts", "Webhooks posted: delivered, or failed.", ["outcome"], registry=self.registry
        )


def _show_consumer(registry: CollectorRegistry, is_ready: Callable[[], bool]) -> None:
    ready = Gauge("everbatch_ready", "1 while this worker takes messages, else 0.", registry=registry)
    ready.set_function(lambda: float(is_ready()))
    registry.register(_ConsumerCollector())


class _ConsumerCollector(Collector):
    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(
            "everbatch_broker_connections",
            "Connections made to take messages by; more than one: it was lost and made again.",
            value=Consumption.connections,
        )


class _EngineCollector(Collector):
    """Reads the engine at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._engine.stats()
        yield _by_tier("everbatch_running", "Jobs in the running batch.", stats.running_by_rank)
        yield _by_tier("everbatch_pending", "Jobs that wait in the engine.", stats.waiting_by_rank)
        for name, text, value in _gauges(stats):
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, value in _counters(stats):
            yield CounterMetricFamily(name, text, value=value)


def _by_tier(name: str, text: str, by_rank: tuple[int, ...]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["tier"])
    for tier in Tier:
        family.add_metric([tier.value], of_rank(by_rank, tier))
    return family


def of_rank(by_rank: tuple[int, ...], tier: Tier) -> int:
    """A tier's part of the engine's numbers by rank, which end at the highest rank that the engine has seen."""
    rank = POLICIES[tier].rank
    return by_rank[rank] if rank < len(by_rank) else 0


def _gauges(stats: Stats) -> Iterator[tuple[str, str, int]]:
    yield "everbatch_slots", "Places in the running batch.", stats.slots
    yield "everbatch_kv_blocks", "Blocks of the KV cache.", stats.blocks_total
    yield "everbatch_kv_blocks_used", "Blocks of the KV cache that are referenced.", stats.blocks_used


def _counters(stats: Stats) -> Iterator[tuple[str, str, int]]:
    yield "everbatch_steps", "Forward passes.", stats.steps
    yield (
        "everbatch_slot_steps",
        "Sequences computed, summed over steps; over steps × slots it is the slot use.",
        stats.slot_steps,
    )
    yield "everbatch_prompt_tokens", "Prompt tokens prefilled for the first time.", stats.prompt_tokens
    yield "everbatch_recomputed_tokens", "Tokens prefilled again.", stats.recomputed_tokens
    yield "everbatch_cached_tokens", "Tokens found in the prefix cache, not computed.", stats.cached_tokens
    yield "everbatch_preemptions", "Sequences that gave their slot to a higher tier.", stats.preemptions
