"""OpenAI's completion objects, made of a job that succeeded, and their chunks, made of its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.asked import CHAT, service_tier_of
from app.choices import Choice
from app.events import Event
from app.logprobs import chat_shape, completion_shape, of_chat_shape
from app.settlements import usage_of
from app.tables import Job


def completion_object(job: Job, choices: Sequence[Choice], endpoint: str) -> dict[str, Any]:
    """The body with which the endpoint would have answered."""
    is_chat = endpoint == CHAT
    return {
        **_head(job, endpoint, "chat.completion" if is_chat else "text_completion"),
        "choices": [_choice(choice, is_chat) for choice in choices],
        "usage": usage_of(job),
    }


def _head(job: Job, endpoint: str, kind: str) -> dict[str, Any]:
    """What a completion and each of its chunks begin with."""
    return {
        "id": f"{'chatcmpl' if endpoint == CHAT else 'cmpl'}-{job.id.removeprefix('job_')}",
        "object": kind,
        "created": int(job.created_at.timestamp()),
        "model": job.model,
        "system_fingerprint": job.model_revision,
        "service_tier": service_tier_of(job),
    }


class Chunks:
    """A streamed completion: the chunks that each event of its job brings.

    A chat's choice begins with a chunk of its role. With usage, each chunk has it as null, and a last one has it alone.
    """

    def __init__(self, job: Job, endpoint: str, *, with_usage: bool) -> None:
        self._is_chat = endpoint == CHAT
        self._head = _head(job, endpoint, "chat.completion.chunk" if self._is_chat else "text_completion")
        self._with_usage = with_usage
        self._shown: dict[int, int] = {}
        """Characters of each choice that has begun."""

    def of(self, event: Event) -> list[dict[str, Any]]:
        match event.kind:
            case "tokens":
                return self._of_tokens(event.data)
            case "succeeded" if self._with_usage:
                return [{**self._head, "choices": [], "usage": event.data["usage"]}]
        return []

    def _of_tokens(self, data: Mapping[str, Any]) -> list[dict[str, Any]]:
        index, text, logprobs, end = (data["index"], data["text"], data.get("logprobs"), data.get("finish_reason"))
        chunks = []
        if index not in self._shown:
            self._shown[index] = 0
            if self._is_chat:
                chunks.append(self._chunk(index, {"role": "assistant", "content": "", "refusal": None}))
        if not self._is_chat:
            shape = None if logprobs is None else completion_shape(of_chat_shape(logprobs), start=self._shown[index])
            chunks.append(self._chunk(index, text, logprobs=shape, finish_reason=end))
        else:
            if text or logprobs:
                shape = None if logprobs is None else {**logprobs, "refusal": None}
                chunks.append(self._chunk(index, {"content": text}, logprobs=shape))
            if end is not None:
                chunks.append(self._chunk(index, {}, finish_reason=end))
        self._shown[index] += len(text)
        return chunks

    def _chunk(
        self,
        index: int,
        said: dict[str, Any] | str,
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        name = "delta" if self._is_chat else "text"
        choice = {"index": index, name: said, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice], **({"usage": None} if self._with_usage else {})}


def _choice(choice: Choice, is_chat: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"text": choice.text}
    if is_chat:
        said = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
    return {
        "index": choice.index,
        **said,
        "logprobs": _logprobs(choice, is_chat),
        "finish_reason": choice.finish_reason,
    }


def _logprobs(choice: Choice, is_chat: bool) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    return chat_shape(choice.logprobs) | {"refusal": None} if is_chat else completion_shape(choice.logprobs)
