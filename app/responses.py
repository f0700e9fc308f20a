"""OpenAI's responses: a body → a job, a job → a response, and a job's events → the numbered events of its stream.

A response has its job's id under another prefix. Its stream is a pure function of the job's log: an event has the same
number whenever it is asked for, so that a client resumes behind any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from app.asked import RESPONSES, asked, fields_of, response_id, service_tier_of
from app.bodies import Body, text_or_list
from app.choices import Choice
from app.errors import InvalidRequest
from app.events import Event
from app.grammars import JsonObject, JsonSchema, NamedSchema, Text
from app.moves import Status
from app.sampling import MaxTokens
from app.settlements import usage_of
from app.submissions import ChatMessage, Deadline, Generation, JobRequest, StreamOptions, Webhook
from app.tables import Job

_WINDOWS_S = {"soonest": None, "2h": 7_200.0, "8h": 28_800.0}
"""background_options.completion_window, as a deadline."""


class InputMessage(ChatMessage):
    """A message, as input or as an earlier output that is sent back."""

    type: Literal["message"] | None = None
    id: str | None = None
    """Ignored, as the next one."""
    status: str | None = None


Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[InputMessage], Field(min_length=1), Tag("list")],
    Discriminator(
        text_or_list,
        custom_error_type="input_type",
        custom_error_message="Input should be a string or a list of messages",
    ),
]


class NamedFormat(NamedSchema):
    """JSON that the schema allows: chat completions say it in two objects."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """What the text is to be."""

    format: Annotated[Text | JsonObject | NamedFormat, Discriminator("type")] | None = None
    verbosity: Literal["medium"] | None = None


class BackgroundOptions(Body):
    """How soon a response is needed."""

    completion_window: Literal["soonest", "2h", "8h"] | None = None


class ResponseRequest(Generation):
    """The body of POST /v1/responses; of what we do not do, only the neutral value is taken."""

    input: Input
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    background: bool | None = None
    background_options: BackgroundOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: Literal[True] | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    user: str | None = None
    """Ignored."""
    webhook: Webhook | None = None
    """Ours, as the next one."""
    deadline: Deadline | None = None

    def as_job(self) -> JobRequest:
        """Raises InvalidRequest for what a response cannot have."""
        for name in ("n", "max_tokens", "response_format"):
            if getattr(self, name) is not None:
                raise InvalidRequest(f"There is no field '{name}'", param=name)
        shared = {name: getattr(self, name) for name in (*Generation.model_fields, "webhook")}
        request = JobRequest(
            **shared
            | {
                "max_tokens": self.max_output_tokens,
                "response_format": self._response_format(),
                "messages": self._messages(),
                "deadline": self._deadline_s(),
            }
        )
        request._name_of_max_tokens = "max_output_tokens"
        return request

    def asked(self) -> dict[str, Any]:
        """What its object shows again."""
        return asked(
            RESPONSES,
            self.service_tier,
            background=self.background,
            instructions=self.instructions,
            max_output_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            text=None if self.text is None else self.text.model_dump(exclude_none=True, by_alias=True),
        )

    def _messages(self) -> list[ChatMessage]:
        instructed = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*instructed, ChatMessage(role="user", content=self.input)]
        return [*instructed, *self.input]

    def _response_format(self) -> Text | JsonObject | JsonSchema | None:
        wanted = None if self.text is None else self.text.format
        if not isinstance(wanted, NamedFormat):
            return wanted
        return JsonSchema(type="json_schema", json_schema=wanted)

    def _deadline_s(self) -> float | None:
        window = None if self.background_options is None else self.background_options.completion_window
        return self.deadline if window is None or self.deadline is not None else _WINDOWS_S[window]


def in_our_words(refusal: InvalidRequest) -> InvalidRequest:
    """The refusal of a response's job, by the names that the client used."""
    message, param = refusal.message, refusal.param or ""
    for theirs, ours in _NAMES.items():
        if param.startswith(theirs):
            return InvalidRequest(message.replace(theirs, ours, 1), param=param.replace(theirs, ours, 1))
    return refusal


_NAMES = {"response_format.json_schema": "text.format", "response_format": "text.format", "messages": "input"}


def response_object(job: Job, choice: Choice) -> dict[str, Any]:
    """OpenAI's response, of a job as it stands; choice is its one output."""
    kept = fields_of(job)
    status = status_of(job)
    has_ended = Status(job.status).is_terminal
    is_cut = status == "incomplete"
    return {
        **_unchanging(job),
        "status": status,
        "completed_at": _seconds(job) if status == "completed" else None,
        "error": _error(job),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": [message(job.id, choice.text, _status_of_message(status))] if choice.text or has_ended else [],
        "usage": _usage(job) if has_ended else None,
        "background": bool(kept.get("background")),
    }


def _unchanging(job: Job) -> dict[str, Any]:
    kept = fields_of(job)
    return {
        "id": response_id(job.id),
        "object": "response",
        "created_at": int(job.created_at.timestamp()),
        "model": job.model,
        "metadata": job.job_metadata,
        "instructions": kept.get("instructions"),
        "max_output_tokens": kept.get("max_output_tokens"),
        "temperature": kept.get("temperature", 1.0),
        "top_p": kept.get("top_p", 1.0),
        "text": kept.get("text", {"format": {"type": "text"}}),
        "service_tier": service_tier_of(job),
        "previous_response_id": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        "store": True,
    }


def status_of(job: Job) -> str:
    """Where the job stands, as OpenAI calls it."""
    match Status(job.status):
        case Status.QUEUED:
            return "queued"
        case Status.RUNNING:
            return "in_progress"
        case Status.SUCCEEDED:
            return "incomplete" if job.finish_reason == "length" else "completed"
        case Status.CANCELLED:
            return "cancelled"
    return "failed"


def message(job_id: str, text: str, status: str) -> dict[str, Any]:
    """A response's one output."""
    content = [text_part(text)] if text or status == "completed" else []
    return {"id": _message_id(job_id), "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message_id(job_id: str) -> str:
    return f"msg_{job_id.removeprefix('job_')}"


def _status_of_message(status: str) -> str:
    return status if status in ("completed", "in_progress") else "incomplete"


def _seconds(job: Job) -> int | None:
    return None if job.finished_at is None else int(job.finished_at.timestamp())


def _error(job: Job) -> dict[str, Any] | None:
    """OpenAI knows few codes, which its strict clients insist on; ours stands beside it."""
    match Status(job.status):
        case Status.FAILED:
            error = job.error or {}
            return {"code": "server_error", "message": error.get("message") or "failed", "reason": error.get("code")}
        case Status.EXPIRED:
            return {"code": "server_error", "message": "Its deadline passed", "reason": "expired"}
    return None


def _usage(job: Job) -> dict[str, Any]:
    usage = usage_of(job)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


class ResponseEvents:
    """The events of a response's stream, numbered from 0, of its job's events from the first on.

    queued → response.created, response.queued · running → response.in_progress
    tokens → response.output_item.added and response.content_part.added, once, response.output_text.delta
    the end → what was added is done, and response.completed, incomplete or failed
    """

    def __init__(self, job: Job, at_end: Callable[[], dict[str, Any]]) -> None:
        """job is the one as it was submitted; at_end gives the response once it has ended."""
        self._beginning = {
            **_unchanging(job),
            "background": bool(fields_of(job).get("background")),
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        self._job_id = job.id
        self._at_end = at_end
        self._number = 0
        self._text: list[str] | None = None
        """Pieces of the text, once there is an output."""

    def of(self, event: Event) -> list[dict[str, Any]]:
        """What one event of the job brings; they must come in order, from its first."""
        shown = list(self._of(event))
        for number, each in enumerate(shown, start=self._number):
            each["sequence_number"] = number
        self._number += len(shown)
        return shown

    def _of(self, event: Event) -> Iterator[dict[str, Any]]:
        match event.kind:
            case "queued":
                if event.number == 1:
                    yield self._lifecycle("created", "queued")
                yield self._lifecycle("queued", "queued")
            case "running":
                yield self._lifecycle("in_progress", "in_progress")
            case "tokens":
                yield from self._added()
                if event.data["text"]:
                    self._pieces.append(event.data["text"])
                    yield self._of_part("output_text.delta", delta=event.data["text"], logprobs=[])
            case _ if event.ends_log:
                yield from self._ended()

    @property
    def _pieces(self) -> list[str]:
        assert self._text is not None
        return self._text

    def _lifecycle(self, name: str, status: str) -> dict[str, Any]:
        return {"type": f"response.{name}", "response": {**self._beginning, "status": status}}

    def _of_part(self, name: str, **more: Any) -> dict[str, Any]:
        return {
            "type": f"response.{name}",
            "item_id": _message_id(self._job_id),
            "output_index": 0,
            "content_index": 0,
            **more,
        }

    def _added(self) -> Iterator[dict[str, Any]]:
        if self._text is not None:
            return
        self._text = []
        item = message(self._job_id, "", "in_progress")
        yield {"type": "response.output_item.added", "output_index": 0, "item": item}
        yield self._of_part("content_part.added", part=text_part(""))

    def _ended(self) -> Iterator[dict[str, Any]]:
        response = self._at_end()
        if response["status"] == "completed":
            yield from self._added()
        if self._text is not None:
            text = "".join(self._text)
            yield self._of_part("output_text.done", text=text, logprobs=[])
            yield self._of_part("content_part.done", part=text_part(text))
            item = message(self._job_id, text, _status_of_message(response["status"]))
            yield {"type": "response.output_item.done", "output_index": 0, "item": item}
        # There is no event for a cancelled response: its status tells it.
        name = "incomplete" if response["status"] == "cancelled" else response["status"]
        yield {"type": f"response.{name}", "response": response}
