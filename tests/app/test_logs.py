"""Log lines are JSON, one per record, and repeat nothing of what a user sent."""

from __future__ import annotations

import json
import logging
import os

from app.logs import JsonLines


def line(record: logging.LogRecord) -> dict[str, object]:
    text = JsonLines("api").format(record)
    assert "\n" not in text
    parsed: dict[str, object] = json.loads(text)
    return parsed


def record(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("app.jobs", logging.WARNING, __file__, 1, message, args, exc_info)


def test_a_line_says_when_who_and_what() -> None:
    found = line(record("%d lines\nlost", 3))
    assert found == {
        "time": found["time"],
        "level": "warning",
        "role": "api",
        "pid": os.getpid(),
        "logger": "app.jobs",
        "message": "3 lines\nlost",
    }
    assert str(found["time"]).endswith("+00:00")


def test_an_exception_is_its_type_and_place_without_its_message() -> None:
    try:
        raise KeyError("SECRET")
    except KeyError as error:
        found = line(record("it broke", error=error))
    assert found["error"] == "KeyError"
    assert str(found["frames"]).count("test_logs.py") == 1
    assert "SECRET" not in str(found)
