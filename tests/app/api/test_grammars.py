"""POST /v1/jobs with the form that the text must have: kept with the job, or refused while others go on."""

from __future__ import annotations

import json
import threading
from typing import Any

from sqlalchemy import select
from werkzeug.test import TestResponse

from app.db import Database
from app.tables import Job

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"enum": ["é"]}}, "required": ["a"]}
BOMB = {"type": "integer", "multipleOf": 99_999_989}
"""Compiled, it takes minutes."""


def asking(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_the_form_is_kept_with_the_job(call: Any, db: Database) -> None:
    answer = call.submit(response_format=asking(SCHEMA))
    assert answer.status_code == 202
    with db.transaction() as session:
        sampling = session.scalars(select(Job.sampling).where(Job.id == answer.get_json()["id"])).one()
    (kept,) = json.loads(sampling["grammar"])["grammars"]
    assert list(kept["json_schema"]["properties"]) == ["b", "a"]  # in the order in which they will be written


def test_a_bomb_is_refused_by_its_field_while_others_are_answered(call: Any) -> None:
    assert call.submit(structured={"choice": ["yes", "no"]}).status_code == 202
    answers = list[TestResponse]()
    bomb = threading.Thread(target=lambda: answers.append(call.submit(response_format=asking(BOMB))))
    bomb.start()
    answered_meanwhile = 0
    while bomb.is_alive():
        assert call.submit().status_code == 202
        answered_meanwhile += bomb.is_alive()
    bomb.join()
    (refused,) = answers
    assert refused.status_code == 422
    assert refused.get_json()["error"]["param"] == "response_format.json_schema.schema"
    assert answered_meanwhile > 1
    assert call.submit(response_format=asking(BOMB)).status_code == 422  # without trying it again


def test_a_large_schema_is_refused_at_once(call: Any) -> None:
    large = {"enum": ["x" * 900_000]}
    answer = call.submit(response_format=asking(large))
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (422, "response_format.json_schema.schema")
    assert call.submit(response_format=asking({"enum": ["x" * 1_000_001]})).status_code == 413
