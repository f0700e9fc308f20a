"""What the driver tells, in one variable: where the service is, whose keys there are, which kind of client is meant."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NewClient = Callable[..., Any]
"""Makes a client, with more options of its own."""
WaitFor = Callable[..., Any]
"""Reads until what was read is as wanted."""


@dataclass(frozen=True)
class Given:
    """What the driver made for this run."""

    url: str
    """Of the server, without /v1."""
    key: str
    """Of a tenant of the plan paid, whom this run has for itself."""
    free_key: str
    """Of another one, of the plan free."""
    admin_key: str
    """Of the scope admin."""
    rated_key: str
    """Of a tenant who may post once a minute."""
    poor_key: str
    """Of a tenant who may use ten tokens a day."""
    expired_batch: str
    """Of the tenant of key."""
    is_strict: bool
    """Whether the client refuses an answer that is not of its types."""
    is_async: bool


GIVEN = Given(**json.loads(os.environ["CONFORMANCE"]))
