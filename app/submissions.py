"""A request's body → a JobRequest, checked field by field → a Submission, rendered and tokenized.

For the routes of the API and for the rows of a batch alike; no web here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import ErrorDetails

from app import outlines, programs, tiers
from app.addresses import check_url
from app.asked import CHAT, COMPLETIONS
from app.bodies import Body, field_path, text_or_list
from app.errors import InvalidRequest, NotFound
from app.grammars import GrammarFields, Grammars
from app.jobs import Submission
from app.models import Model
from app.outlines import Outline, Quote
from app.programs import Parent, ProgramFields
from app.prompts import Prompts
from app.sampling import LogprobFields, MaxTokens, SamplingFields, to_sampling
from app.settings import Settings
from app.tiers import Plan

DEFAULT_MAX_TOKENS = 256
"""Where the client names none and so many fit."""
MAX_DEADLINE_S = 30 * 86_400.0


class TextPart(Body):
    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    """Ignored, as logprobs are: a client may send back what it got."""
    logprobs: list[Any] | None = None


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextPart], Tag("list")],
    Discriminator(
        text_or_list,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of parts of text",
    ),
]


def _kind_of_part(value: Any) -> str:
    if isinstance(value, TextPart) or (isinstance(value, dict) and "type" in value):
        return _PART
    return outlines.QUOTE if isinstance(value, dict | Quote) else outlines.TEXT


_PART = "a part"
QuotingContent = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[
        Annotated[
            Sequence[
                Annotated[
                    Annotated[str, Tag(outlines.TEXT)]
                    | Annotated[Quote, Tag(outlines.QUOTE)]
                    | Annotated[TextPart, Tag(_PART)],
                    Discriminator(_kind_of_part),
                ]
            ],
            Field(max_length=outlines.MAX_PARTS),
        ],
        Tag("list"),
    ],
    Discriminator(
        text_or_list,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of texts and quotes",
    ),
]


class JobMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    """A developer's message is a system's: models know no other word for it."""
    content: QuotingContent

    @property
    def outlined(self) -> dict[str, Any]:
        """As outlines keep it."""
        parts = [self.content] if isinstance(self.content, str) else self.content
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": [
                part.text if isinstance(part, TextPart) else part.model_dump() if isinstance(part, Quote) else part
                for part in parts
            ],
        }

    @property
    def rendered(self) -> dict[str, str]:
        """As the model's template takes it, where nothing is quoted."""
        message = self.outlined
        return {**message, "content": "".join(message["content"])}


class ChatMessage(JobMessage):
    """One that quotes nobody."""

    content: Content


class Webhook(Body):
    url: str


TextOrIds = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[int], Tag("list")],
    Discriminator(
        text_or_list,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string or a list of token ids",
    ),
]
Messages = Annotated[list[ChatMessage], Field(min_length=1)]
Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


Deadline = Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)]
B = TypeVar("B", bound=Body)


class Generation(SamplingFields, GrammarFields):
    """The fields that every way to ask for text has."""

    model: str | None = None
    service_tier: str | None = None
    metadata: Metadata | None = None


class JobRequest(Generation, LogprobFields, ProgramFields):
    """The body of POST /v1/jobs: exactly one of prompt and messages, or none where it continues another job."""

    prompt: outlines.Prompt | None = None
    """Text, token ids, or a list of texts and quotes."""
    messages: Annotated[Sequence[JobMessage], Field(min_length=1)] | None = None
    webhook: Webhook | None = None
    deadline: Deadline | None = None
    """Seconds from now until the job expires. Default: the server's own."""
    _name_of_max_tokens: str = "max_tokens"
    """What the client called it."""

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        num_prompts = (self.prompt is not None) + (self.messages is not None)
        if num_prompts > 1 or (num_prompts == 0 and self.continues is None):
            raise InvalidRequest("Give either prompt or messages", param="prompt")
        return self

    @property
    def named_parents(self) -> outlines.Named:
        """Each field that names a parent, and the id in it."""
        contents = [(f"messages[{place}].content", each.content) for place, each in enumerate(self.messages or ())]
        return [
            *((f"after[{place}]", job_id) for place, job_id in enumerate(self.after or ())),
            *([] if self.continues is None else [("continue", self.continues)]),
            *outlines.quotes_in(self.prompt or "", "prompt"),
            *(quote for field, content in contents for quote in outlines.quotes_in(content, field)),
        ]

    @property
    def outline(self) -> Outline:
        """What its prompt is made of."""
        return Outline(
            continues=self.continues,
            prompt=self.model_dump(mode="json", include={"prompt"})["prompt"],
            messages=None if self.messages is None else [each.outlined for each in self.messages],
            max_tokens=self.max_tokens,
        )


class StreamOptions(Body):
    """How a stream is to look."""

    include_usage: bool | None = None
    """Default: false."""
    include_obfuscation: bool | None = None
    """Ignored: nothing is added to hide how long a text is."""


class _OpenAIBody(Generation):
    """What both OpenAI endpoints have; of what we do not do, only the neutral value is taken."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Ignored."""
    webhook: Webhook | None = None
    """Ours, as the next one."""
    deadline: Deadline | None = None

    @property
    def wants_usage(self) -> bool:
        """At the end of the stream."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _shared(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*Generation.model_fields, "webhook", "deadline")}


class ChatCompletion(_OpenAIBody, LogprobFields):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    store: bool | None = None
    """Ignored: jobs are kept for the days of their tier."""

    def as_job(self) -> JobRequest:
        logprobs = {name: getattr(self, name) for name in LogprobFields.model_fields}
        if self.max_completion_tokens is None:
            return JobRequest(**self._shared(), **logprobs, messages=self.messages)
        shared = self._shared() | {"max_tokens": self.max_completion_tokens}
        request = JobRequest(**shared, **logprobs, messages=self.messages)
        request._name_of_max_tokens = "max_completion_tokens"
        return request


class Completion(_OpenAIBody):
    """The body of /v1/completions."""

    prompt: TextOrIds
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    """So many of the likeliest tokens at each place."""

    def as_job(self) -> JobRequest:
        logprobs: dict[str, Any] = {} if self.logprobs is None else {"logprobs": True, "top_logprobs": self.logprobs}
        return JobRequest(**self._shared(), **logprobs, prompt=self.prompt)


BODIES: dict[str, type[ChatCompletion | Completion]] = {CHAT: ChatCompletion, COMPLETIONS: Completion}
ROW_ENDPOINTS = tuple(BODIES)
"""The endpoints that a batch's rows may name."""


def parse(body: Mapping[str, Any]) -> JobRequest:
    """The request that a body of POST /v1/jobs makes. Raises InvalidRequest, naming the first wrong field."""
    return validated(JobRequest, body)


def parse_row(endpoint: str, body: Mapping[str, Any]) -> JobRequest:
    """The request that a batch row's body makes; endpoint is one of ROW_ENDPOINTS.

    Raises InvalidRequest, which names the field as one of the row: body.prompt.
    """
    row = validated(BODIES[endpoint], body, within=("body",))
    for name in ("stream", "stream_options", "webhook", "deadline"):
        if getattr(row, name):
            raise InvalidRequest(f"body.{name} is nothing for a row of a batch", param=f"body.{name}")
    return row.as_job()


def to_submission(
    request: JobRequest,
    *,
    plan: Plan,
    model: Model,
    prompts: Prompts,
    grammars: Grammars,
    settings: Settings,
    asked: Mapping[str, Any] | None = None,
    parents: Mapping[str, Parent] | None = None,
) -> Submission:
    """What jobs.submit takes: rendered, tokenized, with all defaults filled in; parents are those that it names.

    A batch sets tier, deadline and row with dataclasses.replace. Raises NotFound for a model that is not served,
    InvalidRequest for what does not fit it, Unavailable while grammars cannot be checked.
    """
    if request.model is not None and request.model != model.name:
        raise NotFound(f"There is no model '{request.model[:64]}'; this server has '{model.name}'", param="model")
    tier = tiers.admit(plan, request.service_tier)
    prompt_ids = outlines.own_ids(request.outline, prompts) if parents else _prompt_ids(request, prompts)
    max_tokens = _max_tokens(request, len(prompt_ids), model.context_length)
    return Submission(
        tier=tier,
        model=model.name,
        model_revision=model.revision,
        prompt_ids=() if parents else prompt_ids,
        sampling=to_sampling(
            request,
            max_tokens=max_tokens,
            top_logprobs=request.num_top_logprobs,
            prompts=prompts,
            vocab_size=model.vocab_size,
            grammar=grammars.of(request),
        ),
        num_choices=request.n or 1,
        deadline_s=settings.tiers[tier].deadline_s if request.deadline is None else request.deadline,
        metadata=request.metadata or {},
        webhook_url=None if request.webhook is None else check_url(request.webhook.url, settings),
        asked=asked,
        child=programs.child_of(request.outline, parents, model, num_own=len(prompt_ids)) if parents else None,
    )


def _prompt_ids(request: JobRequest, prompts: Prompts) -> tuple[int, ...]:
    match request.prompt:
        case str():
            return prompts.of_text(request.prompt)
        case list():
            return prompts.of_ids([each for each in request.prompt if isinstance(each, int)])
    assert request.messages is not None
    return prompts.of_messages([each.rendered for each in request.messages])


def _max_tokens(request: JobRequest, prompt_tokens: int, context_length: int) -> int:
    room = context_length - prompt_tokens
    if room < 1:
        field = "messages" if request.prompt is None else "prompt"
        raise InvalidRequest(
            f"{field} has {prompt_tokens} tokens; the model's context of {context_length} must hold one more",
            param=field,
        )
    if request.max_tokens is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if request.max_tokens > room:
        name = request._name_of_max_tokens
        raise InvalidRequest(
            f"{name} may be at most {room}: the prompt has {prompt_tokens} of the model's {context_length} tokens",
            param=name,
        )
    return request.max_tokens


def validated(schema: type[B], body: Mapping[str, Any], *, within: tuple[str, ...] = ()) -> B:
    """The body as its schema; within says where it stands. Raises InvalidRequest, naming the first wrong field."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _refusal(first, within) from None


def _refusal(error: ErrorDetails, within: tuple[str, ...]) -> InvalidRequest:
    """An error of a body, with the field's path as the client wrote it."""
    path = field_path((*within, *_as_written(error["loc"])))
    match error["type"]:
        case "extra_forbidden":
            return InvalidRequest(f"There is no field '{path}'", param=path)
        case "missing":
            return InvalidRequest(f"{path} is missing", param=path)
        case "model_type":
            return InvalidRequest(f"{path}: input should be an object", param=path)
    message = error["msg"]
    return InvalidRequest(f"{path}: {message[:1].lower()}{message[1:]}", param=path)


_KINDS_OF_PARTS = frozenset({outlines.TEXT, outlines.QUOTE, _PART})


def _as_written(location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Without what is not the client's: the tag of a union behind its field, and the mark behind a key."""
    location = tuple(segment for segment in location if segment not in _KINDS_OF_PARTS)
    match location:
        case ("prompt" | "stop" | "response_format" as field, str(), *inner):
            return (field, *inner)
        case ("text", "format", str(), *inner):
            return ("text", "format", *inner)
        case ("input", str(), *inner):
            return _as_written(("input", *inner))
        case ("messages" | "input" as field, int() as place, "content", str(), *inner):
            return (field, place, "content", *inner)
        case ("metadata" | "logit_bias" as field, key, "[key]"):
            return (field, key)
    return location
