"""/v1/batches: OpenAI's shapes, and each tenant's own."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from app import batches, claims
from app.claims import Finished
from app.db import Database
from app.grammars import Grammars
from app.models import Model
from app.moves import Status
from app.prompts import Prompts
from app.rows import Desk
from app.settings import Settings
from app.shelf import Shelf
from app.tables import Job
from worker.batches import Clerk

UNKNOWN = f"batch_{'0' * 32}"
MOMENTS = (
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at"),
    *("failed_at", "expired_at", "cancelling_at", "cancelled_at"),
)


def row(custom_id: str) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}


def upload(call: Any, *rows: dict[str, Any]) -> str:
    content = "".join(f"{json.dumps(each)}\n" for each in rows).encode()
    data = {"purpose": "batch", "file": (io.BytesIO(content), "rows.jsonl")}
    file_id: str = call("POST", "/v1/files", data=data, content_type="multipart/form-data").json["id"]
    return file_id


def create(call: Any, *rows: dict[str, Any], **fields: Any) -> Any:
    body = {"endpoint": "/v1/completions", "completion_window": "24h"} | fields
    body.setdefault("input_file_id", upload(call, *rows) if rows else "")
    return call("POST", "/v1/batches", json=body)


@pytest.fixture
def run(db: Database, settings: Settings, model: Model, worker: Any) -> Callable[[str], None]:
    """Plays the io worker and the engine worker until a batch has ended."""
    clerk = Clerk(db, Desk(settings, model, Prompts(model), Grammars(model)), Shelf(settings))

    def work(batch_id: str) -> None:
        with db.transaction() as session:
            queued = session.query(Job.id).filter(Job.batch_id == batch_id, Job.status == "queued")
            claimed = claims.claim(session, worker.id, {job_id: 1 for (job_id,) in queued})
            claims.finish(session, worker.id, [Finished(each.job_id, 1, Status.SUCCEEDED, "stop") for each in claimed])

    def until_ended(batch_id: str) -> None:
        while True:
            moved = clerk.advance(batch_id).moved
            with db.transaction() as session:
                is_open = batch_id in batches.open_batches(session)
            if not is_open:
                return
            if not moved:
                work(batch_id)

    return until_ended


def test_a_new_batch_has_openais_shape(call: Any) -> None:
    answer = create(call, row("a"), metadata={"run": "7"})
    assert answer.status_code == 200
    batch = answer.json
    assert set(batch) == {
        *("id", "object", "endpoint", "model", "errors", "input_file_id", "completion_window", "status"),
        *("output_file_id", "error_file_id", *MOMENTS, "request_counts", "usage", "metadata"),
    }
    assert (batch["object"], batch["status"], batch["endpoint"]) == ("batch", "validating", "/v1/completions")
    assert batch["metadata"] == {"run": "7"}
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert batch["expires_at"] - batch["created_at"] == 86_400
    for name in ("output_file_id", "error_file_id", "errors", "completed_at", "cancelled_at"):
        assert batch[name] is None
    assert call("GET", f"/v1/batches/{batch['id']}").json == batch


def test_a_batch_runs_to_its_files(call: Any, run: Callable[[str], None]) -> None:
    batch_id = create(call, row("a"), row("b"), row("a")).json["id"]
    run(batch_id)
    batch = call("GET", f"/v1/batches/{batch_id}").json
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert batch["usage"]["input_tokens"] > 0
    assert batch["usage"]["total_tokens"] == batch["usage"]["input_tokens"] + batch["usage"]["output_tokens"]
    for name in ("created_at", "in_progress_at", "finalizing_at", "completed_at"):
        assert isinstance(batch[name], int)
    lines = call("GET", f"/v1/files/{batch['output_file_id']}/content", buffered=True).data.splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == ["a", "b"]
    (error,) = call("GET", f"/v1/files/{batch['error_file_id']}/content", buffered=True).data.splitlines()
    assert json.loads(error)["response"]["body"]["error"]["code"] == "invalid_request"
    listed = {file["id"]: file["purpose"] for file in call("GET", "/v1/files").json["data"]}
    assert listed[batch["output_file_id"]] == "batch_output"


def test_a_cancel_with_an_empty_body_is_taken_at_any_time(call: Any, run: Callable[[str], None]) -> None:
    batch_id = create(call, row("a")).json["id"]
    headers = {"Content-Type": "application/json"}
    answer = call("POST", f"/v1/batches/{batch_id}/cancel", headers=headers, data=b"")
    assert (answer.status_code, answer.json["status"]) == (200, "cancelling")
    run(batch_id)
    again = call("POST", f"/v1/batches/{batch_id}/cancel", headers=headers, data=b"").json
    assert (again["status"], again["output_file_id"]) == ("cancelled", None)
    assert again["error_file_id"] is not None


def test_an_ended_batch_cannot_be_cancelled_for_ever(call: Any, run: Callable[[str], None]) -> None:
    batch_id = create(call, row("a")).json["id"]
    run(batch_id)
    answer = call("POST", f"/v1/batches/{batch_id}/cancel")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")


def test_a_file_is_kept_while_its_batch_runs(call: Any, run: Callable[[str], None]) -> None:
    batch = create(call, row("a")).json
    path = f"/v1/files/{batch['input_file_id']}"
    assert call("DELETE", path).status_code == 409
    run(batch["id"])
    assert call("DELETE", path).status_code == 200
    assert call("GET", f"/v1/batches/{batch['id']}").json["status"] == "completed"


def test_lists_are_paged(call: Any) -> None:
    ids = [create(call, row("a")).json["id"] for _ in range(3)]
    first = call("GET", "/v1/batches?limit=2").json
    assert ([each["id"] for each in first["data"]], first["has_more"]) == ([ids[2], ids[1]], True)
    rest = call("GET", f"/v1/batches?limit=2&after={first['last_id']}").json
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == ([ids[0]], False)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, 422, "endpoint"),
        ({"completion_window": "1y"}, 422, "completion_window"),
        ({"input_file_id": f"file_{'0' * 32}"}, 404, "input_file_id"),
        ({"input_file_id": "no id at all"}, 404, "input_file_id"),
        ({"webhook": {"url": "https://127.0.0.1/"}}, 422, "webhook.url"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, 422, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, 422, "output_expires_after.anchor"),
    ],
)
def test_a_wrong_field_is_refused_by_name(call: Any, fields: dict[str, Any], status: int, param: str) -> None:
    answer = create(call, row("a"), **fields)
    assert answer.status_code == status
    assert answer.json["error"]["param"] == param


def test_somebody_elses_batch_looks_like_none(call: Any, call_as: Any, new_tenant: Callable[..., Any]) -> None:
    batch, other = create(call, row("a")).json, call_as(new_tenant())
    for method, path in (("GET", ""), ("POST", "/cancel")):
        theirs, none = (other(method, f"/v1/batches/{batch_id}{path}") for batch_id in (batch["id"], UNKNOWN))
        assert (theirs.status_code, none.status_code) == (404, 404)
        assert theirs.text.replace(batch["id"], UNKNOWN) == none.text
    assert other("GET", "/v1/batches").json["data"] == []
    assert create(other, input_file_id=batch["input_file_id"]).status_code == 404
    assert call("GET", f"/v1/batches/{batch['id']}").json["status"] == "validating"


def test_a_row_of_a_batch_is_a_job_of_its_tenant(call: Any, run: Callable[[str], None]) -> None:
    batch_id = create(call, row("a")).json["id"]
    run(batch_id)
    (job,) = call("GET", "/v1/jobs").json["data"]
    assert (job["tier"], job["status"]) == ("bulk", "succeeded")
    assert call("DELETE", f"/v1/jobs/{job['id']}").status_code == 409
