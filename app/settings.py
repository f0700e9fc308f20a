"""One frozen settings object, the only reader of the environment.

Each field is the variable EVERBATCH_<NAME>; a wrong value stops the start with its name and value.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.tiers import TierTable


def _default_home() -> Path:
    """A place that the unprivileged user of the embedded Postgres can enter: root's own home is not."""
    if os.geteuid() == 0:
        return Path("/var/lib/everbatch")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "everbatch"


Network = IPv4Network | IPv6Network
Port = Annotated[int, Field(ge=1, le=65535)]


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="EVERBATCH_",
        env_nested_delimiter="__",
        enable_decoding=False,
        nested_model_default_partial_update=True,
        frozen=True,
        extra="ignore",
        allow_inf_nan=False,
    )

    home: Path = Field(default_factory=_default_home, validate_default=True)
    """Data of the embedded servers, converted models, uploaded files, secrets."""
    database_url: str | None = Field(default=None, pattern=r"^postgresql\+psycopg://")
    """A Postgres ≥ 15 of one's own; unset: the embedded one in the home."""
    redis_url: str | None = Field(default=None, pattern=r"^rediss?://")
    """A Redis or Valkey of one's own; unset: the embedded one in the home."""
    secret_key: SecretStr | None = None
    """Encrypts webhook secrets at rest (a Fernet key); unset: made once and kept in the home."""

    model: str = "smollm2-135m-instruct"
    """The model that is served: smollm2-135m-instruct, echo (no model at all), or a local Hugging Face directory."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto: bfloat16 where the hardware multiplies it fast, float32 elsewhere."""
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Slots: sequences in the running batch."""
    max_num_batched_tokens: int = Field(default=256, ge=1, validate_default=True)
    """Tokens computed in one step, decodes and prefill pieces together."""
    step_budget_ms: float = Field(default=200.0, gt=0)
    """No piece of a prompt joins a step with decodes that would then be expected to take longer, in milliseconds."""
    policy: Literal["tiered", "fair", "priority", "fcfs", "sjf", "ljf"] = "tiered"
    """Who joins the running batch first; tiered: by tier with floors, then tenant, deadline and arrival."""
    prefill: Literal["chunked", "interleaved", "first"] = "chunked"
    """How prompts share the steps with decodes."""
    preemption: Literal["auto", "recompute", "swap", "discard"] = "auto"
    """What becomes of the KV cache of a sequence that gives its slot to a higher tier."""
    kv_swap_gib: float = Field(default=0.25, ge=0)
    """Host memory for the KV blocks of preempted sequences, in GiB; 0: none."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Memory of the KV cache on a CPU, in GiB."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, lt=1)
    """Share of a GPU's memory that weights, activations and KV cache may take together."""
    echo_step_ms: float = Field(default=5.0, ge=0)
    """How long a step of the echo engine takes, in milliseconds."""

    host: str = "127.0.0.1"
    """Where the API listens."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Where the API listens; 0 takes a free one."""
    api_workers: int = Field(default=1, ge=1, le=64)
    """API processes; one answers some hundred requests a second, and shows some thousand events."""
    api_threads: int = Field(default=256, ge=8)
    """Threads of an API process; streams take all but 32 of them, and at least one."""
    metrics_host: str = "127.0.0.1"
    """Private bind of /metrics, for the API and for each worker."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of /metrics; 0: any free one, written to the log. A fixed one serves one process per host."""

    tiers: TierTable = TierTable()
    """What each tier gets; EVERBATCH_TIERS__BULK__FLOOR is one value of it."""
    max_body_bytes: int = Field(default=1_000_000, ge=1)
    """Largest request body or batch line, in bytes."""
    max_open_batches: int = Field(default=100, ge=1)
    """Batches of one tenant that have not ended; above it, creating one answers 429."""
    max_batch_rows: int = Field(default=1_000_000, ge=1)
    """Rows of a batch's input file; one with more fails."""
    max_file_bytes: int = Field(default=200_000_000, ge=1)
    """Size of an uploaded file, in bytes."""

    lease_s: float = Field(default=5.0, gt=0)
    """A worker whose heartbeat is older is dead, in seconds of database time."""
    heartbeat_s: float = Field(default=1.0, gt=0, validate_default=True)
    """Seconds between two heartbeats of a worker; at most a third of the lease."""
    sweep_interval_s: float = Field(default=1.0, gt=0)
    """Seconds between two looks for lost messages, dead workers and passed deadlines."""
    dispatch_interval_s: float = Field(default=1.0, gt=0)
    """Seconds between two looks at waiting jobs when nobody nudged."""
    flush_interval_ms: float = Field(default=50.0, gt=0)
    """How long new tokens may wait for their common write, in milliseconds."""
    drain_s: float = Field(default=10.0, ge=0)
    """On SIGTERM, running jobs may finish for so many seconds; the rest are handed back."""
    load_limit_s: float = Field(default=600.0, gt=0)
    """A worker that has not loaded its model and warmed it up in so many seconds ends, to be started again."""
    watchdog_s: float = Field(default=60.0, gt=0)
    """An engine with work and no step for so many seconds is stuck: its worker ends, and the jobs resume elsewhere."""
    max_deaths: int = Field(default=5, ge=1)
    """Workers that may die under one job without progress before it fails as poison."""
    webhook_allow_private: bool = False
    """Webhooks may go to private addresses, over plain http, to any port."""
    webhook_allow_http: bool = False
    """Webhooks may go over plain http."""
    webhook_networks: tuple[Network, ...] = ()
    """Private networks that webhooks may go to, such as 10.20.0.0/16,fd00:20::/32."""
    webhook_ports: tuple[Port, ...] = Field(default=(443, 8443), min_length=1)
    """Ports that webhooks may go to beside those of https, and of http where it is allowed."""
    webhook_keep_days: float = Field(default=30.0, gt=0)
    """Days for which a webhook that was delivered or given up is kept in the log, and may be delivered again."""
    webhook_timeout_s: float = Field(default=15.0, gt=0, le=30)
    """What a receiver has from connect to answer, in seconds; shorter than the lease of an attempt."""
    max_wait_s: float = Field(default=300.0, gt=0, le=3600)
    """How long a request may wait for the job that it made, in seconds."""
    sse_heartbeat_s: float = Field(default=10.0, gt=0)
    """Seconds of silence after which a stream shows that it lives."""

    @field_validator("webhook_networks", "webhook_ports", mode="before")
    @classmethod
    def _split(cls, given: object) -> object:
        """The environment holds a list as one text, with commas."""
        return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        """One home, however it is written and wherever a process runs."""
        return home.expanduser().absolute()

    @field_validator("tiers")
    @classmethod
    def _floors_leave_room(cls, tiers: TierTable) -> TierTable:
        """Help for a tier begins well above its floor."""
        total = tiers.paid.floor + tiers.free.floor + tiers.bulk.floor
        if total > 0.5:
            why = "The floors add up to {total}; they may be half of all tokens together"
            raise PydanticCustomError("too_high_floors", why, {"total": round(total, 4)})
        return tiers

    @field_validator("heartbeat_s")
    @classmethod
    def _outlives_two_lost_beats(cls, heartbeat_s: float, others: ValidationInfo) -> float:
        lease_s = others.data.get("lease_s", 5.0)
        if heartbeat_s > lease_s / 3:
            why = "Input should be at most a third of EVERBATCH_LEASE_S = {lease_s}: a late beat is no death"
            raise PydanticCustomError("too_few_beats", why, {"lease_s": lease_s})
        return heartbeat_s

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _holds_every_slot(cls, tokens: int, others: ValidationInfo) -> int:
        slots = others.data.get("max_num_seqs", 1)
        if tokens < slots:
            why = "Input should be at least EVERBATCH_MAX_NUM_SEQS = {slots}: a step holds a token for each slot"
            raise PydanticCustomError("too_few_tokens", why, {"slots": slots})
        return tokens


class ClientSettings(BaseSettings):
    """Where the commands that talk to a service find it; unset: in the home's file."""

    model_config = SettingsConfigDict(env_prefix="EVERBATCH_", frozen=True, extra="ignore")

    url: str | None = None
    """The address of the service, such as http://127.0.0.1:8000."""
    api_key: SecretStr | None = None
    """A tenant's key."""


def environment(settings: Settings) -> dict[str, str]:
    """Our environment for a child process that is to read these very settings, whatever was set before."""
    spelled = {f"EVERBATCH_{name.upper()}": value for name, value in _spelled(settings)}
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("EVERBATCH_")} | spelled


def _spelled(values: BaseModel) -> Iterator[tuple[str, str]]:
    """All that is set, by name: tiers__bulk__floor."""
    for name in type(values).model_fields:
        match getattr(values, name):
            case None:
                pass
            case BaseModel() as inner:
                yield from ((f"{name}__{inner_name}", value) for inner_name, value in _spelled(inner))
            case SecretStr() as secret:
                yield name, secret.get_secret_value()
            case tuple() as several:
                yield name, ",".join(map(str, several))
            case value:
                yield name, str(value)


@functools.cache
def get_settings() -> Settings:
    """The process's settings, read once."""
    return Settings()


def complaint(error: Exception) -> str:
    """What keeps a process from its start: of the environment a line for each variable, with its name and value."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "\n".join(
        f"EVERBATCH_{'__'.join(map(str, each['loc'])).upper()}{_shown(each['input'])}: {each['msg']}"
        for each in error.errors()
    )


def _shown(value: object) -> str:
    """A value, without a password; nothing of one that several variables make together."""
    if isinstance(value, dict):
        return ""
    return f" is {re.sub(r'//[^/]*@', '//…@', value) if isinstance(value, str) else value!r}"
