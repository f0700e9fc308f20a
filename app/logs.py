"""Logs: one JSON object per line on stderr. No prompts, no secrets.

An exception is logged by its type and its frames; its message is left out, because it may repeat what a user sent.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from datetime import UTC, datetime

_FRAMES = 8
"""Innermost frames of an exception that are written."""


def setup(role: str) -> None:
    """Send all logs of this process to stderr; role says what the process is: api, engine, io."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def adopt(name: str) -> None:
    """Send the logs of a library that brings its own handlers the same way as ours."""
    library = logging.getLogger(name)
    library.handlers[:] = []
    library.propagate = True


class JsonLines(logging.Formatter):
    """{time, level, role, pid, logger, message}, and error, frames with an exception."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": self._role,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = type(error).__name__
            line["frames"] = [
                f"{frame.filename}:{frame.lineno} {frame.name}"
                for frame in traceback.extract_tb(error.__traceback__)[-_FRAMES:]
            ]
        return json.dumps(line)
