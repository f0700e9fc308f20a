"""OpenAI's completion objects, made of a job that succeeded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.choices import Choice
from app.logprobs import chat_shape, completion_shape
from app.settlements import usage_of
from app.tables import Job

CHAT = "/v1/chat/completions"


def completion_object(job: Job, choices: Sequence[Choice], endpoint: str) -> dict[str, Any]:
    """The body with which the endpoint would have answered."""
    is_chat = endpoint == CHAT
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{job.id.removeprefix('job_')}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(job.created_at.timestamp()),
        "model": job.model,
        "system_fingerprint": job.model_revision,
        "choices": [_choice(choice, is_chat) for choice in choices],
        "usage": usage_of(job),
    }


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
