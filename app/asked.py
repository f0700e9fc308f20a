"""How a job was asked for, where that was in OpenAI's words: its endpoint, and what its object shows again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.tables import Job
from app.tiers import Tier

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"


def asked(endpoint: str, service_tier: str | None, **fields: Any) -> dict[str, Any]:
    """What a job's row keeps of it."""
    kept = {name: value for name, value in fields.items() if value is not None}
    return {"endpoint": endpoint, **kept, **({"service_tier": "priority"} if service_tier == "priority" else {})}


def endpoint_of(job: Job) -> str | None:
    """None for a job of our own API, and for a row of a batch."""
    return fields_of(job).get("endpoint")


def fields_of(job: Job) -> Mapping[str, Any]:
    return job.asked or {}


def service_tier_of(job: Job) -> str:
    """The tier that the job really runs in, as OpenAI calls it: default, flex or priority."""
    if job.tier == Tier.BULK:
        return "flex"
    service_tier: str = fields_of(job).get("service_tier", "default")
    return service_tier


def response_id(job_id: str) -> str:
    """The id under which clients know a job as a response."""
    return f"resp_{job_id.removeprefix('job_')}"


def job_id_of(response_id: str) -> str:
    return f"job_{response_id.removeprefix('resp_')}"
