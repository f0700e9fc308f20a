"""OpenAI's completion objects, made of a job that succeeded."""

from __future__ import annotations

from typing import Any

from app.settlements import usage_of
from app.tables import Job

CHAT = "/v1/chat/completions"


def completion_object(job: Job, endpoint: str) -> dict[str, Any]:
    """The body with which the endpoint would have answered. The job's output_text must be loaded."""
    is_chat = endpoint == CHAT
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{job.id.removeprefix('job_')}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(job.created_at.timestamp()),
        "model": job.model,
        "system_fingerprint": job.model_revision,
        "choices": [_choice(job, is_chat)],
        "usage": usage_of(job),
    }


def _choice(job: Job, is_chat: bool) -> dict[str, Any]:
    text = job.output_text or ""
    said = {"message": {"role": "assistant", "content": text, "refusal": None}} if is_chat else {"text": text}
    return {"index": 0, **said, "logprobs": None, "finish_reason": job.finish_reason}
