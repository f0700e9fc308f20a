"""The shapes of our JSON answers, for /openapi.json. A field that may be missing is NotRequired."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from app import batches, moves, uploads
from app.tiers import Tier
from app.waiting import Reason

Moment = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339, in UTC."""
Day = Annotated[str, Field(json_schema_extra={"format": "date"})]
UnixSeconds = int
Count = Annotated[int, Field(ge=0)]


class Usage(TypedDict):
    """What a job is charged."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class Likely(TypedDict):
    """A token and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Likely):
    """A token that was made, with the likeliest ones at its place."""

    top_logprobs: list[Likely]


class Logprobs(TypedDict):
    """How likely the tokens of a choice were."""

    content: list[TokenLogprob]


class Choice(TypedDict):
    """One output of a job, so far."""

    index: Count
    text: str
    finish_reason: str | None
    logprobs: NotRequired[Logprobs]


class Output(TypedDict):
    """All outputs of a job, so far."""

    choices: list[Choice]


class Failure(TypedDict):
    """Why a job failed."""

    code: str
    message: str
    param: NotRequired[str]
    parent: NotRequired[str]
    """Which one did not succeed, with the code parent_failed."""


class Wait(TypedDict):
    """Where a queued job stands."""

    position: Count
    estimated_start_at: Moment | None
    reason: Reason


class Job(TypedDict):
    """A generation, as its tenant sees it."""

    id: str
    object: Literal["job"]
    status: moves.Status
    tier: Tier
    model: str
    attempt: Count
    created_at: Moment
    started_at: Moment | None
    finished_at: Moment | None
    output: Output
    usage: Usage
    error: Failure | None
    metadata: dict[str, str]
    queue: NotRequired[Wait]


class _List(TypedDict):
    object: Literal["list"]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Jobs(_List):
    """A page of jobs, newest first."""

    data: list[Job]


class DeletedJob(TypedDict):
    """A job that is gone."""

    id: str
    object: Literal["job"]
    deleted: Literal[True]


class File(TypedDict):
    """OpenAI's file object."""

    id: str
    object: Literal["file"]
    bytes: Count
    created_at: UnixSeconds
    expires_at: UnixSeconds | None
    filename: str
    purpose: str
    status: Literal["processed"]


class Files(_List):
    """A page of files."""

    data: list[File]


class DeletedFile(TypedDict):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class Upload(TypedDict):
    """OpenAI's upload object."""

    id: str
    object: Literal["upload"]
    bytes: Count
    created_at: UnixSeconds
    expires_at: UnixSeconds
    filename: str
    purpose: str
    status: uploads.Status
    file: File | None


class UploadPart(TypedDict):
    """A part of an upload."""

    id: str
    object: Literal["upload.part"]
    created_at: UnixSeconds
    upload_id: str


class RequestCounts(TypedDict):
    """Rows of a batch."""

    total: Count
    completed: Count
    failed: Count


class BatchError(TypedDict):
    """Why a batch failed."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(TypedDict):
    """All that is wrong with a batch as a whole."""

    object: Literal["list"]
    data: list[BatchError]


class Batch(TypedDict):
    """OpenAI's batch object."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: batches.Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: UnixSeconds
    in_progress_at: UnixSeconds | None
    expires_at: UnixSeconds
    finalizing_at: UnixSeconds | None
    completed_at: UnixSeconds | None
    failed_at: UnixSeconds | None
    expired_at: UnixSeconds | None
    cancelling_at: UnixSeconds | None
    cancelled_at: UnixSeconds | None
    request_counts: RequestCounts
    usage: dict[str, Any]
    metadata: dict[str, str] | None


class Batches(_List):
    """A page of batches, newest first."""

    data: list[Batch]


class Model(TypedDict):
    """The served model."""

    id: str
    object: Literal["model"]
    created: UnixSeconds
    owned_by: str


class Models(TypedDict):
    """The one model that is served."""

    object: Literal["list"]
    data: list[Model]


class DayUsage(TypedDict):
    """What was charged on a day."""

    day: Day
    model: str
    tier: Tier
    jobs: Count
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class UsageList(TypedDict):
    """What was charged, by day, model and tier."""

    object: Literal["list"]
    start: Day
    end: Day
    data: list[DayUsage]


class TierDepth(TypedDict):
    """How long a tier's line is."""

    queued: Count
    running: Count
    oldest_wait_s: Annotated[float, Field(ge=0)]
    starts_per_s: Annotated[float, Field(ge=0)]


class Queue(TypedDict):
    """How long the lines are, of all tenants together."""

    object: Literal["queue"]
    model: str
    tiers: dict[Tier, TierDepth]


class TierShare(TypedDict):
    """What a tier was served of late."""

    share: float
    floor: float
    tokens: Count
    fairness_index: float | None
    queued: Count
    running: Count
    oldest_wait_s: float


class TenantShare(TypedDict):
    """What a tenant was served of late."""

    name: str
    tier: Tier
    weight: float
    share_of_tier: float
    prompt_tokens: Count
    completion_tokens: Count
    is_waiting: bool


class Shares(TypedDict):
    """Who was served what."""

    object: Literal["shares"]
    model: str
    window_s: Count
    tiers: dict[Tier, TierShare]
    tenants: list[TenantShare]


class _Completion(TypedDict):
    id: str
    created: UnixSeconds
    model: str
    system_fingerprint: str
    service_tier: Literal["default", "flex", "priority"]
    usage: Usage


class ChatMessage(TypedDict):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None


class ChatChoice(TypedDict):
    """One answer to a chat."""

    index: Count
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatCompletion(_Completion):
    """OpenAI's chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextChoice(TypedDict):
    """One way to go on with a text."""

    index: Count
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class TextCompletion(_Completion):
    """OpenAI's completion."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ResponseText(TypedDict):
    """A part of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ResponseMessage(TypedDict):
    """What the assistant says."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[ResponseText]


class Response(TypedDict):
    """OpenAI's response; it has more fields, which are the client's own."""

    id: str
    object: Literal["response"]
    created_at: UnixSeconds
    completed_at: UnixSeconds | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    model: str
    service_tier: Literal["default", "flex", "priority"]
    metadata: dict[str, str]
    output: list[ResponseMessage]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None


class DeletedResponse(TypedDict):
    """A response that is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class Endpoint(TypedDict):
    """A receiver of webhooks: OpenAI's fields, and whether it is sent to."""

    id: str
    object: Literal["webhook_endpoint"]
    created_at: UnixSeconds
    updated_at: UnixSeconds
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str
    enabled: bool
    disabled_reason: str | None


class EndpointWithSecret(Endpoint):
    """An endpoint, with the secret that is shown this once."""

    signing_secret: str


class Endpoints(_List):
    """A page of endpoints, newest first."""

    data: list[Endpoint]


class DeletedEndpoint(TypedDict):
    """An endpoint that is gone."""

    id: str
    object: Literal["webhook_endpoint.deleted"]
    deleted: Literal[True]


class WebhookSecret(TypedDict):
    """The secret of the webhooks that jobs and batches name, shown this once."""

    object: Literal["webhook_secret"]
    signing_secret: str
    signing_secret_hint: str


class EndpointTest(TypedDict):
    """How a sample was answered."""

    object: Literal["webhook_endpoint.test"]
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: bool


class Redelivery(TypedDict):
    """How many deliveries go again."""

    object: Literal["webhook_endpoint.redelivery"]
    webhook_endpoint_id: str
    deliveries: Count


class EventTypes(TypedDict):
    """All that is told."""

    object: Literal["list"]
    data: list[str]


class DeliveryAttempt(TypedDict):
    """One try to deliver."""

    number: Count
    started_at: Moment | None
    ended_at: Moment | None
    status_code: int | None
    error: str | None


class Delivery(TypedDict):
    """One webhook, sent or to be sent."""

    id: str
    object: Literal["webhook_delivery"]
    event_type: str
    subject_id: str
    webhook_endpoint_id: str | None
    url: str
    is_test: bool
    status: str
    status_code: int | None
    error: str | None
    created_at: Moment
    next_attempt_at: Moment | None
    delivered_at: Moment | None
    attempts: list[DeliveryAttempt]


class Deliveries(_List):
    """A page of deliveries, newest first."""

    data: list[Delivery]


class Alive(TypedDict):
    """The process lives."""

    status: Literal["ok"]


class Readiness(TypedDict):
    """Whether jobs can be taken, and what does not answer."""

    status: Literal["ready", "unready"]
    missing: list[str]
    workers: int | None


class OpenAIError(TypedDict):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str
    job_id: NotRequired[str]


class Problem(TypedDict):
    """An error: RFC 9457's problem document, with OpenAI's error object in it."""

    type: str
    title: str
    status: int
    detail: str
    instance: NotRequired[str]
    job_id: NotRequired[str]
    error: OpenAIError
