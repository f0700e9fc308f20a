"""The tables.

Times are UTC by the database's clock; ids are made in Python; text of models is bytes, for it may hold NUL.
"""

from __future__ import annotations

from datetime import date, datetime
from typing import Any, ClassVar

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    Date,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Sequence,
    SmallInteger,
    Text,
    TypeDecorator,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class ModelText(TypeDecorator[str]):
    """Text that a model made, kept as UTF-8 bytes: Postgres text refuses U+0000, which a model may well produce."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        return None if value is None else value.encode()

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | None:
        return None if value is None else bytes(value).decode()


class Base(DeclarativeBase):
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text,
        datetime: DateTime(timezone=True),
        date: Date,
        dict[str, Any]: JSONB,
        list[int]: ARRAY(Integer),
        list[str]: ARRAY(Text),
        bytes: LargeBinary,
    }


NOW = func.clock_timestamp()
STATEMENT_TIME = func.statement_timestamp()
"""The time for conditions: it stands still while a statement runs, so that an index can be searched for it. For
clock_timestamp(), which may change from row to row, each row would be read."""

dispatch_numbers = Sequence("dispatch_numbers", metadata=Base.metadata)
"""The order in which jobs are handed to the broker."""


class Tenant(Base):
    """Who pays and owns."""

    __tablename__ = "tenants"
    __table_args__ = (
        CheckConstraint("plan in ('paid', 'free')", name="tenants_plan"),
        CheckConstraint("weight > 0", name="tenants_weight"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    plan: Mapped[str]
    webhook_secret: Mapped[bytes]
    """Encrypted with the secret key; signs the webhooks that its jobs and batches name."""
    old_webhook_secret: Mapped[bytes | None]
    """What signed before the last rotation, and signs beside it for a while."""
    old_webhook_secret_until: Mapped[datetime | None]
    weight: Mapped[float] = mapped_column(server_default=text("1"))
    """Its share of the tokens beside other tenants of a tier, above 0."""
    tokens_per_day: Mapped[int | None] = mapped_column(BigInteger)
    """Its quota: what its jobs of a day, in UTC, may use, prompts and outputs together; none: no quota."""
    requests_per_minute: Mapped[int | None]
    """POST requests that it may send in a minute; none: no limit."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class ApiKey(Base):
    """A bearer key: found by its public prefix, proved by the hash of the whole."""

    __tablename__ = "api_keys"
    __table_args__ = (CheckConstraint("scope in ('jobs', 'admin')", name="api_keys_scope"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    prefix: Mapped[str] = mapped_column(unique=True)
    hash: Mapped[bytes]
    """SHA-256 of the key: fast is right for 256 random bits."""
    scope: Mapped[str] = mapped_column(server_default=text("'jobs'"))
    """What it opens: the tenant's own jobs, or the operator's view of all."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    revoked_at: Mapped[datetime | None]


class Job(Base):
    """One generation. Its status is written by moves.move() alone."""

    __tablename__ = "jobs"
    __table_args__ = (
        CheckConstraint(
            "status in ('queued', 'running', 'succeeded', 'failed', 'cancelled', 'expired')", name="jobs_status"
        ),
        CheckConstraint("(status = 'running') = (owner is not null)", name="jobs_owner"),
        Index("jobs_by_tenant", "tenant_id", "id"),
        Index(
            "jobs_in_line",
            "model",
            "tier",
            "tenant_id",
            "id",
            postgresql_where=text(
                "status = 'queued' and dispatch_number is null and not handed_back and not awaits_parents"
            ),
        ),
        Index(
            "jobs_handed_back",
            "model",
            "tier",
            "id",
            postgresql_where=text("status = 'queued' and dispatch_number is null and handed_back"),
        ),
        Index(
            "jobs_dispatched",
            "model",
            "tier",
            "dispatch_number",
            postgresql_where=text("status = 'queued' and dispatch_number is not null"),
        ),
        Index("jobs_claimed", "model", "tier", "claimed_number"),
        Index("jobs_running", "owner", postgresql_where=text("status = 'running'")),
        Index("jobs_unfinished", "deadline_at", postgresql_where=text("status in ('queued', 'running')")),
        Index(
            "jobs_of_tenant_queued",
            "tenant_id",
            "tier",
            postgresql_where=text("status = 'queued' and batch_id is null"),
        ),
        Index("jobs_by_end", "tier", "finished_at", postgresql_where=text("finished_at is not null")),
        Index("jobs_by_batch", "batch_id", "row_number", unique=True, postgresql_where=text("batch_id is not null")),
        Index("jobs_by_custom_id", "batch_id", "custom_id", postgresql_where=text("custom_id is not null")),
        Index(
            "jobs_of_batch_unfinished",
            "batch_id",
            postgresql_where=text("batch_id is not null and status in ('queued', 'running')"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    tier: Mapped[str]
    model: Mapped[str]
    model_revision: Mapped[str]
    status: Mapped[str]
    prompt_ids: Mapped[list[int]] = mapped_column(deferred=True)
    prompt_tokens: Mapped[int]
    sampling: Mapped[dict[str, Any]] = mapped_column(deferred=True)
    """The fields of engine.request.Sampling; the seed is drawn at submit where the client gave none."""
    num_choices: Mapped[int] = mapped_column(SmallInteger, server_default=text("1"))
    """How many outputs it has, each sampled by itself."""
    has_logprobs: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether its tokens are kept with their logarithms of probability."""
    job_metadata: Mapped[dict[str, Any]] = mapped_column("metadata", server_default=text("'{}'"))
    webhook_url: Mapped[str | None]
    asked: Mapped[dict[str, Any] | None]
    """How it was asked for, where that was in OpenAI's words: see app.asked."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    deadline_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    """When its first attempt began."""
    finished_at: Mapped[datetime | None]

    attempt: Mapped[int] = mapped_column(server_default=text("0"))
    """The fence: a write of an older attempt has no effect."""
    deaths: Mapped[int] = mapped_column(server_default=text("0"))
    """Workers that died under it since it last made progress."""
    tokens_at_death: Mapped[int] = mapped_column(server_default=text("0"))
    """Tokens persisted when a worker last died under it: more than that is progress."""
    owner: Mapped[str | None]
    """The worker incarnation that runs it."""
    dispatch_number: Mapped[int | None] = mapped_column(BigInteger)
    """Set while a message at the broker names this job."""
    dispatched_at: Mapped[datetime | None]
    claimed_number: Mapped[int | None] = mapped_column(BigInteger)
    """The dispatch number of the message by which it was last claimed."""
    handed_back: Mapped[bool] = mapped_column(server_default=text("false"))
    """It ran before, so it goes to the front of the line."""
    counter: Mapped[float] = mapped_column(server_default=text("0"))
    """Its tenant's token counter as dispatch found it: the worker's engine goes on from it."""
    charged_cost: Mapped[float | None]
    """What the tenant's counter was charged at the first dispatch, in virtual tokens; the settlement corrects it."""
    charged_weight: Mapped[float | None]
    """The tenant's weight at that moment: what is corrected is divided by what was charged was divided by."""
    reserved_tokens: Mapped[int] = mapped_column(server_default=text("0"))
    """What it may use at most, reserved of its tenant's quota for the day of its submission; 0 where there is none."""

    finish_reason: Mapped[str | None]
    """Of its first choice; the others' are told by their events."""
    output_text: Mapped[str | None] = mapped_column(ModelText, deferred=True)
    """Of its first choice."""
    completion_tokens: Mapped[int] = mapped_column(server_default=text("0"))
    """Of all choices."""
    error: Mapped[dict[str, Any] | None]
    """{code, message}"""

    awaits_parents: Mapped[bool] = mapped_column(server_default=text("false"))
    """It stands in no line, and has no prompt, before the last of its parents has ended."""
    depth: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    """How many jobs, one behind the other, had yet to end before it as it was submitted."""

    batch_id: Mapped[str | None] = mapped_column(ForeignKey("batches.id"))
    row_number: Mapped[int | None]
    """The line of the batch's input file, from 1."""
    custom_id: Mapped[str | None]


class Outline(Base):
    """The prompt of a job that awaits its parents, before their texts are in it; gone with the waiting."""

    __tablename__ = "outlines"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    outline: Mapped[dict[str, Any]]
    """As app.programs.Outline has it."""
    most_prompt_tokens: Mapped[int]
    """What the prompt was expected to have at most, and what its job reserved for it."""


class Parent(Base):
    """A job, and one that it waits for; gone with the waiting."""

    __tablename__ = "parents"
    __table_args__ = (Index("parents_by_parent", "parent_id"), Index("parents_due", "look_at"))

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    parent_id: Mapped[str] = mapped_column(primary_key=True)
    """No foreign key: to insert a child would lock its parent, and a claim passes over what is locked."""
    look_at: Mapped[datetime] = mapped_column(server_default=NOW)
    """When somebody is to look whether the child may run: as the parent ends, and now and then before."""


class Event(Base):
    """A fact about a job. Numbers run from 1 without gap; the primary key refuses a second writer."""

    __tablename__ = "events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    """tokens, or the status that the job moved to."""
    data: Mapped[dict[str, Any] | None]
    """What is shown; of tokens only the finish_reason, with the last ones of a choice."""
    choice: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    """Whose tokens they are: the index of the job's choice."""
    text: Mapped[str | None] = mapped_column(ModelText)
    """What is shown, for tokens."""
    token_ids: Mapped[list[int] | None]
    """Tokens of the choice generated since the event before; a new attempt goes on from them."""
    logprobs: Mapped[bytes | None]
    """Of each of the tokens, where the job wants them, as app.logprobs packs them."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class TokenCounter(Base):
    """What a tenant was served in a tier of a model, in virtual tokens over its weight."""

    __tablename__ = "token_counters"
    __table_args__ = (Index("token_counters_in_line", "model", "tier", "tenant_id", postgresql_where=text("in_line")),)

    model: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    served: Mapped[float]
    last_start: Mapped[float]
    """What it stood at before its last job was charged."""
    in_line: Mapped[bool]
    """Whether jobs of the tenant waited at the last dispatch."""
    mean_generated: Mapped[float | None]
    """Tokens that its jobs generated lately, in the mean; none before the first has ended."""


class Settlement(Base):
    """What a job that ended is charged: inserted by its terminal move, soon folded into UsageDay and TokenCounter."""

    __tablename__ = "settlements"
    __table_args__ = (Index("settlements_by_tenant", "tenant_id", "day"),)

    job_id: Mapped[str] = mapped_column(primary_key=True)
    """No foreign key: a deleted job is charged all the same."""
    tenant_id: Mapped[str]
    day: Mapped[date]
    """The day, in UTC, on which the job was submitted."""
    model: Mapped[str]
    tier: Mapped[str]
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    charged_cost: Mapped[float]
    """What the tenant's counter was charged for it at dispatch, in virtual tokens."""
    charged_weight: Mapped[float | None]
    """The weight by which that was divided; none for a job that was not charged."""
    reserved_tokens: Mapped[int]
    """What it had reserved of the quota of its day."""


class QuotaDay(Base):
    """The tokens of a tenant with a quota on a day: reserved by jobs that have not been settled, and used."""

    __tablename__ = "quota_days"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    day: Mapped[date] = mapped_column(primary_key=True)
    reserved: Mapped[int] = mapped_column(BigInteger)
    used: Mapped[int] = mapped_column(BigInteger)


class UsageDay(Base):
    """What a tenant's jobs of a day, model and tier were charged: settlements, folded."""

    __tablename__ = "usage_days"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    day: Mapped[date] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    jobs: Mapped[int] = mapped_column(BigInteger)
    """Jobs that ended."""
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)


class IdempotencyRecord(Base):
    """An Idempotency-Key and the job that it made."""

    __tablename__ = "idempotency_records"
    __table_args__ = (Index("idempotency_records_by_job", "job_id"),)

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[bytes]
    """SHA-256 of the canonical body."""
    job_id: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Worker(Base):
    """One incarnation of a worker: alive while its heartbeat is fresh and nobody declared it dead."""

    __tablename__ = "workers"
    __table_args__ = (Index("workers_alive", "heartbeat_at", postgresql_where=text("not dead")),)

    id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str]
    host: Mapped[str]
    pid: Mapped[int]
    slots: Mapped[int]
    ready: Mapped[bool] = mapped_column(server_default=text("true"))
    """Whether it takes jobs: its consumer asks the broker, and it is not about to end."""
    metrics_url: Mapped[str | None]
    """Where it answers with its metrics, on its own host; none when its port was taken."""
    steps: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    """The engine's step counter: health is progress."""
    started_at: Mapped[datetime] = mapped_column(server_default=NOW)
    heartbeat_at: Mapped[datetime] = mapped_column(server_default=NOW)
    dead: Mapped[bool] = mapped_column(server_default=text("false"))


class Endpoint(Base):
    """A receiver of webhooks that a tenant keeps: it is told of all work that ends with the events it wants."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (Index("webhook_endpoints_by_tenant", "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    url: Mapped[str]
    event_types: Mapped[list[str]]
    """Types of events, or job.*, batch.*, response.* for all of a kind."""
    enabled: Mapped[bool] = mapped_column(server_default=text("true"))
    disabled_reason: Mapped[str | None]
    """Why it is not enabled, where the service has disabled it."""
    secret: Mapped[bytes]
    """Encrypted with the secret key; signs its webhooks."""
    old_secret: Mapped[bytes | None]
    """What signed before the last rotation, and signs beside it for a while."""
    old_secret_until: Mapped[datetime | None]
    secret_hint: Mapped[str]
    """The end of the secret, by which its owner knows it."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)
    """When the endpoint or its secret was last changed."""


class Receiver(Base):
    """A receiver of a tenant whose last attempt failed. One that takes what it gets has no row."""

    __tablename__ = "receivers"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    """An endpoint's id, or the origin of the URLs that jobs and batches name: https://host:443."""
    failures: Mapped[int]
    """Failed attempts in a row."""
    paused_until: Mapped[datetime | None]
    """Before that nothing is posted to it."""
    failed_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Delivery(Base):
    """One webhook to be sent; its id is the webhook-id of every attempt."""

    __tablename__ = "deliveries"
    __table_args__ = (
        CheckConstraint("status in ('pending', 'sending', 'delivered', 'dead')", name="deliveries_status"),
        Index(
            "deliveries_by_receiver",
            "tenant_id",
            "receiver",
            "next_at",
            "id",
            postgresql_where=text("status in ('pending', 'sending')"),
        ),
        Index("deliveries_sending", "next_at", postgresql_where=text("status = 'sending'")),
        Index("deliveries_pending", "give_up_at", postgresql_where=text("status = 'pending'")),
        Index("deliveries_ended", "created_at", postgresql_where=text("status in ('delivered', 'dead')")),
        Index("deliveries_by_job", "job_id"),
        Index("deliveries_by_endpoint", "endpoint_id", "id", postgresql_where=text("endpoint_id is not null")),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    job_id: Mapped[str]
    """The job, or the batch, whose end it tells; of a test nobody's."""
    endpoint_id: Mapped[str | None]
    """Of the endpoint that wants it; none where the job or the batch names the URL itself. No foreign key: the log
    outlives the endpoint."""
    receiver: Mapped[str]
    """What shares a pace: the endpoint, or the tenant's URLs of one origin. See Receiver."""
    event_type: Mapped[str]
    url: Mapped[str]
    """Where it is posted; of an endpoint as it was at the last attempt."""
    body: Mapped[str]
    """The exact JSON text that is signed and posted, ASCII only."""
    is_test: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether the tenant asked for it, to try the endpoint, and nothing has ended."""
    status: Mapped[str] = mapped_column(server_default=text("'pending'"))
    attempts: Mapped[int] = mapped_column(server_default=text("0"))
    last_attempt: Mapped[int] = mapped_column(server_default=text("10"))
    """The number of the attempt behind which it is given up."""
    next_at: Mapped[datetime] = mapped_column(server_default=NOW)
    """When it is due; while it is being sent, when the sender counts as dead."""
    give_up_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp() + interval '4 days'"))
    """When it is given up though attempts are left, for its receiver was paused for so long."""
    response_status: Mapped[int | None]
    error: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    delivered_at: Mapped[datetime | None]


class DeliveryAttempt(Base):
    """One attempt to post a delivery, as its log shows it."""

    __tablename__ = "delivery_attempts"

    delivery_id: Mapped[str] = mapped_column(ForeignKey("deliveries.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    started_at: Mapped[datetime] = mapped_column(server_default=NOW)
    ended_at: Mapped[datetime | None]
    """None while it runs, and for ever where its sender was lost."""
    response_status: Mapped[int | None]
    error: Mapped[str | None]


class File(Base):
    """An uploaded or generated file; its bytes lie in the home under its id."""

    __tablename__ = "files"
    __table_args__ = (Index("files_by_tenant", "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    filename: Mapped[str]
    purpose: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime | None]
    """From when on it is gone; None: never."""


class Upload(Base):
    """A file that comes in parts; their bytes lie in the home under their ids until they are joined."""

    __tablename__ = "uploads"
    __table_args__ = (Index("uploads_by_tenant", "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    filename: Mapped[str]
    purpose: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    """Of all parts together, as it was announced."""
    expires_after_s: Mapped[int | None]
    """How long the file is kept once it is whole; None: for ever."""
    status: Mapped[str]
    file_id: Mapped[str | None]
    """The file that it became; no foreign key: the file may be removed."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime]


class UploadPart(Base):
    """A part of an upload that is not whole yet."""

    __tablename__ = "upload_parts"
    __table_args__ = (Index("upload_parts_by_upload", "upload_id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    upload_id: Mapped[str] = mapped_column(ForeignKey("uploads.id", ondelete="CASCADE"))
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Batch(Base):
    """An OpenAI-style file of requests. Its rows are jobs of the bulk tier."""

    OPEN: ClassVar[tuple[str, ...]] = ("validating", "in_progress", "finalizing", "cancelling")
    """Statuses of a batch that has not ended."""

    __tablename__ = "batches"
    __table_args__ = (
        Index("batches_by_tenant", "tenant_id", "id"),
        Index(
            "batches_open",
            "id",
            postgresql_where=text("status in ('validating', 'in_progress', 'finalizing', 'cancelling')"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    endpoint: Mapped[str]
    completion_window: Mapped[str]
    status: Mapped[str]
    input_file_id: Mapped[str]
    """No foreign key: the file may be removed once the batch has ended."""
    output_file_id: Mapped[str | None]
    """Chosen at the start, so that writing the file twice gives one file; shown once the batch has ended."""
    error_file_id: Mapped[str | None]
    output_expires_after_s: Mapped[int | None]
    """How long both are kept; None: for ever."""
    errors: Mapped[dict[str, Any] | None]
    batch_metadata: Mapped[dict[str, Any] | None] = mapped_column("metadata")
    webhook_url: Mapped[str | None]
    rows_read: Mapped[int] = mapped_column(server_default=text("0"))
    """Rows of the input file that have become jobs."""
    lines_read: Mapped[int] = mapped_column(server_default=text("0"))
    """Lines of the input file that were read: rows, and blank lines between them."""
    bytes_read: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    """Where in the input file the next row starts."""
    total_rows: Mapped[int | None]
    """Rows of the input file; None until they were counted."""
    completed_rows: Mapped[int | None]
    """Rows whose jobs succeeded. As the two below None until the batch has ended: its jobs are not kept for ever."""
    prompt_tokens: Mapped[int | None] = mapped_column(BigInteger)
    completion_tokens: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    in_progress_at: Mapped[datetime | None]
    finalizing_at: Mapped[datetime | None]
    completed_at: Mapped[datetime | None]
    failed_at: Mapped[datetime | None]
    expired_at: Mapped[datetime | None]
    cancelling_at: Mapped[datetime | None]
    cancelled_at: Mapped[datetime | None]
    expires_at: Mapped[datetime]
