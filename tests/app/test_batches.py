"""Batches: as many lines come out as rows went in, whatever happens in between."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app import batches, claims, files, moves, recovery
from app import db as clock
from app.batches import Status
from app.claims import Finished
from app.db import Database
from app.errors import Conflict, InvalidRequest, NotFound, QueueFull, Unavailable
from app.events import Delta, append_tokens
from app.grammars import Grammars
from app.logprobs import TokenLogprob, pack
from app.models import Model
from app.prompts import Prompts
from app.rows import Desk, encoded
from app.settings import Settings
from app.shelf import Shelf
from app.tables import NOW, Batch, Delivery, Job, Tenant
from worker import batches as advancing
from worker.batches import BATCH_LOCK, Clerk

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


def row(custom_id: str, prompt: str = "hi", **body: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": TEXT, "body": {"prompt": prompt, **body}}
    return json.dumps(fields).encode()


def rows(number: int) -> list[bytes]:
    return [row(f"row-{position}") for position in range(number)]


class Crash(Exception):
    """The process dies before it commits."""


class Crashing(Database):
    """The same database, in a process that dies at the end of each transaction."""

    def __init__(self, database: Database) -> None:
        self.__dict__ = database.__dict__

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        with super().transaction() as session:
            yield session
            raise Crash


OK = [TokenLogprob(b"o", -0.5), TokenLogprob(b"k", -0.25)]


@dataclass(frozen=True)
class Play:
    """A tenant's batches, advanced by hand, and a worker that runs their jobs."""

    db: Database
    settings: Settings
    desk: Desk
    shelf: Shelf
    tenant_id: str
    worker: Any

    def upload(self, lines: Iterable[bytes], purpose: str = "batch") -> str:
        with self.db.transaction() as session, self.shelf.draft() as draft:
            draft.write(b"\n".join(lines))
            return files.add(session, self.tenant_id, draft, filename="in.jsonl", purpose=purpose).id

    def create(self, lines: Iterable[bytes], **fields: Any) -> str:
        body = {"input_file_id": self.upload(lines), "endpoint": TEXT, "completion_window": "24h"} | fields
        with self.db.transaction() as session:
            request = batches.parse(body, self.settings)
            return batches.create(session, self.tenant_id, request, self.settings).id

    def step(self, batch_id: str, *, crash: bool = False) -> bool:
        """One step of the batch; with crash all of it is undone before the commit."""
        clerk = Clerk(Crashing(self.db) if crash else self.db, self.desk, self.shelf)
        try:
            return clerk.advance(batch_id).moved
        except Crash:
            return True

    def steps(self, batch_id: str) -> None:
        """Steps until the batch waits for its jobs."""
        while self.step(batch_id):
            pass

    def work(self, batch_id: str, limit: int = 10_000, end: moves.Status = moves.Status.SUCCEEDED) -> int:
        """Run up to limit queued jobs of the batch, each to the text 'ok'; return how many there were."""
        with self.db.transaction() as session:
            queued = select(Job.id).where(Job.batch_id == batch_id, Job.status == "queued").limit(limit)
            claimed = claims.claim(session, self.worker.id, dict.fromkeys(session.scalars(queued), 1))
            deltas = [
                Delta(each.job_id, each.attempt, each.last_event + 1 + choice, "ok", (1, 2), choice, "stop", packed)
                for each in claimed
                for packed in [pack(OK) if "top_logprobs" in each.sampling else None]
                for choice in range(len(each.begun))
            ]
            append_tokens(session, self.worker.id, deltas)
            ends = [Finished(each.job_id, each.attempt, end, "stop") for each in claimed]
            claims.finish(session, self.worker.id, ends)
        return len(claimed)

    def run(self, batch_id: str) -> Batch:
        """Advance and work until the batch has ended."""
        while (batch := self.batch(batch_id)).status in Batch.OPEN:
            self.steps(batch_id)
            self.work(batch_id)
        return batch

    def batch(self, batch_id: str) -> Batch:
        with self.db.transaction() as session:
            return batches.find(session, self.tenant_id, batch_id)

    def counts(self, batch_id: str) -> dict[str, int]:
        with self.db.transaction() as session:
            batch = batches.find(session, self.tenant_id, batch_id)
            return batches.count(session, [batch])[batch_id].shown

    def cancel(self, batch_id: str) -> Batch:
        with self.db.transaction() as session:
            return batches.cancel(session, self.tenant_id, batch_id)[0]

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        with self.db.transaction() as session:
            file = files.find(session, self.tenant_id, file_id)
        content = self.shelf.path(file_id).read_bytes()
        assert len(content) == file.bytes
        assert file.purpose == files.BATCH_OUTPUT
        return [json.loads(line) for line in content.splitlines()]

    def output(self, batch: Batch) -> list[dict[str, Any]]:
        return self.lines(batch.output_file_id)

    def errors(self, batch: Batch) -> list[dict[str, Any]]:
        return self.lines(batch.error_file_id)

    def jobs(self, batch_id: str) -> Counter[str]:
        with self.db.transaction() as session:
            return Counter(session.scalars(select(Job.status).where(Job.batch_id == batch_id)))

    def let_expire(self, batch_id: str) -> None:
        with self.db.transaction() as session:
            session.execute(update(Batch).where(Batch.id == batch_id).values(expires_at=NOW))
            session.execute(update(Job).where(Job.batch_id == batch_id).values(deadline_at=NOW))
            recovery.expire(session)


@pytest.fixture(scope="module")
def desk(settings: Settings, model: Model) -> Desk:
    return Desk(settings, model, Prompts(model), Grammars(model))


@pytest.fixture
def play(db: Database, settings: Settings, desk: Desk, owner: Any, worker: Any) -> Play:
    return Play(db, settings, desk, Shelf(settings), owner.tenant_id, worker)


# ---- all of it


def test_as_many_lines_come_out_as_rows_went_in(play: Play) -> None:
    """Good rows, malformed ones, twins within and across windows, one too long, blank lines, CRLF and a mark."""
    bad = {
        3: b"{not json",
        50: row("row-7"),
        120: row("long", "x" * 20_000),
        260: b'{"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}}',
        300: row("row-7"),
        301: row("stream", stream=True),
    }
    lines = rows(320)
    for position, content in bad.items():
        lines[position] = content
    lines[0] = b"\xef\xbb\xbf" + lines[0]
    lines[10:10] = [b"", b"   \r"]
    batch_id = play.create(line + b"\r" for line in lines)

    batch = play.run(batch_id)

    assert batch.status == Status.COMPLETED
    output, errors = play.output(batch), play.errors(batch)
    assert len(output) + len(errors) == 320
    assert len(errors) == len(bad)
    assert play.counts(batch_id) == {"total": 320, "completed": 314, "failed": 6}
    assert [line["custom_id"] for line in output] == [f"row-{i}" for i in range(320) if i not in bad]
    assert [line["custom_id"] for line in errors] == [None, "row-7", "long", "get", "row-7", "stream"]
    messages = [line["response"]["body"]["error"]["message"] for line in errors]
    numbers = [4, 53, 123, 263, 303, 304]  # of lines: two blank ones stand before the 11th row
    for message, number, names in zip(
        messages,
        numbers,
        ["JSON", "custom_id 'row-7' stands already in line 8", "prompt", "method", "line 8", "stream"],
        strict=True,
    ):
        assert message.startswith(f"line {number}: ")
        assert names in message
    params = [line["response"]["body"]["error"]["param"] for line in errors]
    assert params == [None, "custom_id", "body.prompt", "method", "custom_id", "body.stream"]
    assert len({line["id"] for line in output + errors}) == 320


def test_an_output_line_has_openais_shape(play: Play) -> None:
    batch = play.run(play.create([row("a")]))
    assert batch.error_file_id is None
    (line,) = play.output(batch)
    assert set(line) == {"id", "custom_id", "response", "error"}
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    body = line["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["completion_tokens"] == 2


def test_rows_have_their_choices_and_logprobs_beside_those_without(play: Play) -> None:
    asked: list[dict[str, Any]] = [{}, {"n": 3}, {"logprobs": 2}, {"n": 2, "logprobs": 0}, {}]
    batch = play.run(play.create([row(str(number), prompt="hi", **fields) for number, fields in enumerate(asked)]))
    bodies = [line["response"]["body"] for line in play.output(batch)]
    logprobs = {
        "tokens": ["o", "k"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"o": -0.5}, {"k": -0.25}],
        "text_offset": [0, 1],
    }
    for body, fields in zip(bodies, asked, strict=True):
        assert body["choices"] == [
            {
                "index": index,
                "text": "ok",
                "logprobs": logprobs if "logprobs" in fields else None,
                "finish_reason": "stop",
            }
            for index in range(fields.get("n", 1))
        ]
        assert body["usage"]["completion_tokens"] == 2 * fields.get("n", 1)


def test_a_chat_row_gets_a_chat_completion(play: Play) -> None:
    fields = {
        "custom_id": "a",
        "method": "POST",
        "url": CHAT,
        "body": {"messages": [{"role": "user", "content": "hi"}]},
    }
    batch = play.run(play.create([json.dumps(fields).encode()], endpoint=CHAT))
    (line,) = play.output(batch)
    body = line["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "ok", "refusal": None}


def test_without_a_success_there_is_no_output_file(play: Play) -> None:
    batch = play.run(play.create([b"{", row("a", max_tokens=0)]))
    assert (batch.status, batch.output_file_id) == (Status.COMPLETED, None)
    assert [line["response"]["status_code"] for line in play.errors(batch)] == [400, 400]


def test_a_row_that_failed_while_it_ran_is_a_server_error(play: Play) -> None:
    batch_id = play.create([row("a")])
    play.steps(batch_id)
    play.work(batch_id, end=moves.Status.FAILED)
    (line,) = play.errors(play.run(batch_id))
    assert line["response"]["status_code"] == 500
    assert line["response"]["body"]["error"]["type"] == "server_error"


@pytest.mark.parametrize("lines", [[], [b"\xef\xbb\xbf", b"  \r", b""]])
def test_a_file_without_rows_fails_the_batch(play: Play, lines: list[bytes]) -> None:
    batch = play.run(play.create(lines))
    assert batch.status == Status.FAILED
    assert batch.errors is not None
    assert batch.errors["data"][0]["code"] == "empty_file"
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


def test_a_lost_file_fails_the_batch_and_cancels_its_jobs(play: Play) -> None:
    batch_id = play.create(rows(3))
    play.steps(batch_id)
    play.shelf.erase(play.batch(batch_id).input_file_id)
    batch = play.run(batch_id)
    assert batch.status == Status.FAILED
    assert play.jobs(batch_id) == {"cancelled": 3}


# ---- windows


def test_rows_come_in_windows_while_few_jobs_are_unfinished(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advancing, "WINDOW_ROWS", 10)
    monkeypatch.setattr(advancing, "MAX_UNFINISHED", 20)
    batch_id = play.create(rows(45))
    play.steps(batch_id)
    assert play.jobs(batch_id) == {"queued": 20}
    play.work(batch_id, limit=1)
    play.steps(batch_id)
    assert play.jobs(batch_id) == {"succeeded": 1, "queued": 29}
    assert not play.step(batch_id)
    assert play.counts(batch_id) == {"total": 45, "completed": 1, "failed": 0}
    assert len(play.output(play.run(batch_id))) == 45


def test_a_window_is_bounded_in_bytes(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advancing, "WINDOW_BYTES", 500)
    batch_id = play.create(rows(20))
    play.step(batch_id)
    play.step(batch_id)
    assert 0 < play.batch(batch_id).rows_read < 10
    assert len(play.output(play.run(batch_id))) == 20


def test_a_crash_at_any_step_loses_and_doubles_nothing(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is done, undone by a crash, and done again, the writing of the files included."""
    monkeypatch.setattr(advancing, "WINDOW_ROWS", 7)
    monkeypatch.setattr(advancing, "MAX_UNFINISHED", 14)
    lines = rows(40)
    lines[5] = b"{"
    batch_id = play.create(lines)
    while play.batch(batch_id).status in Batch.OPEN:
        play.step(batch_id, crash=True)
        if not play.step(batch_id):
            play.work(batch_id, limit=9)
    batch = play.batch(batch_id)
    assert batch.status == Status.COMPLETED
    assert [line["custom_id"] for line in play.output(batch)] == [f"row-{i}" for i in range(40) if i != 5]
    assert len(play.errors(batch)) == 1
    assert not [path for path in play.shelf.directory.iterdir() if path.name.startswith(".")]


def test_only_one_advances_a_batch_at_a_time(play: Play) -> None:
    batch_id = play.create(rows(3))
    with play.db.exclusively(BATCH_LOCK, batch_id) as is_mine:
        assert is_mine and not play.step(batch_id)
    assert play.step(batch_id)


# ---- ends before its time


def test_a_cancelled_batch_keeps_what_succeeded_and_names_the_rest(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advancing, "WINDOW_ROWS", 5)
    monkeypatch.setattr(advancing, "MAX_UNFINISHED", 10)
    batch_id = play.create(rows(30))
    play.steps(batch_id)
    play.work(batch_id, limit=4)
    assert play.cancel(batch_id).status == Status.CANCELLING
    assert play.jobs(batch_id) == {"succeeded": 4, "cancelled": 6}  # at once, not with the next round
    assert play.cancel(batch_id).status == Status.CANCELLING
    batch = play.run(batch_id)
    assert (batch.status, play.cancel(batch_id).status) == (Status.CANCELLED, Status.CANCELLED)
    output, errors = play.output(batch), play.errors(batch)
    assert (len(output), len(errors)) == (4, 26)
    assert {line["custom_id"] for line in output + errors} == {f"row-{i}" for i in range(30)}
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert {line["response"] for line in errors} == {None}
    assert play.counts(batch_id) == {"total": 30, "completed": 4, "failed": 26}


def test_a_batch_cancelled_before_its_rows_were_counted_names_them_all(play: Play) -> None:
    batch_id = play.create(rows(3))
    play.cancel(batch_id)
    batch = play.run(batch_id)
    assert batch.status == Status.CANCELLED
    assert len(play.errors(batch)) == 3


class CancellingShelf(Shelf):
    """Where a batch is cancelled as its input is opened: after the look at it, before its step."""

    def __init__(self, play: Play, batch_id: str) -> None:
        super().__init__(play.settings)
        self._cancel = lambda: play.cancel(batch_id)

    def open(self, file_id: str) -> Any:
        self._cancel()
        return super().open(file_id)


@pytest.mark.parametrize("num_steps", range(4))
def test_a_cancel_between_look_and_step_is_kept(play: Play, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether rows are to be counted, the first or the last window read, or the end prepared."""
    monkeypatch.setattr(advancing, "WINDOW_ROWS", 2)
    batch_id = play.create(rows(3))
    for _ in range(num_steps):
        play.step(batch_id)
    play.work(batch_id)
    before = play.jobs(batch_id)
    Clerk(play.db, play.desk, CancellingShelf(play, batch_id)).advance(batch_id)
    assert play.jobs(batch_id) == before, "none of its rows became a job since"
    assert play.run(batch_id).status == Status.CANCELLED
    assert play.counts(batch_id)["completed"] == before["succeeded"]


def test_rows_that_take_long_to_read_are_read_outside_of_transactions(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction that waits for its process is ended by Postgres, and the step would fail for ever."""
    monkeypatch.setattr("app.db.IDLE_TRANSACTION_S", 1)
    monkeypatch.setattr(advancing, "WINDOW_S", 0.0)
    own = Database(play.settings.database_url or "")
    convert = Desk.submission_of

    def slowly(desk: Desk, row: Any, endpoint: str) -> Any:
        time.sleep(1.5)
        return convert(desk, row, endpoint)

    monkeypatch.setattr(Desk, "submission_of", slowly)
    batch_id = play.create(rows(2))
    clerk = Clerk(own, play.desk, play.shelf)
    while clerk.advance(batch_id).moved:
        pass
    own.close()
    assert play.jobs(batch_id) == {"queued": 2}, "a row at a time: WINDOW_S had passed after each"


def test_a_file_with_too_many_rows_fails_the_batch(play: Play) -> None:
    desk = replace(play.desk, settings=play.settings.model_copy(update={"max_batch_rows": 2}))
    for number, status in ((2, Status.IN_PROGRESS), (3, Status.FAILED)):
        batch_id = play.create(rows(number))
        Clerk(play.db, desk, play.shelf).advance(batch_id)
        assert play.batch(batch_id).status == status
    assert play.batch(batch_id).errors["data"][0]["message"] == "The input file has more than 2 rows"  # type: ignore[index]


def test_a_row_whose_form_cannot_be_tried_now_is_read_later(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "a", "max_tokens": 1, "structured": {"choice": ["x", "y"]}}
    line = encoded({"custom_id": "a", "method": "POST", "url": TEXT, "body": body})
    batch_id = play.create([line])
    play.step(batch_id)
    with monkeypatch.context() as patched:
        patched.setattr(play.desk.grammars._trials, "_command", ["/bin/false"])
        for _ in range(2):
            with pytest.raises(Unavailable):
                play.step(batch_id)
    assert (play.batch(batch_id).rows_read, play.jobs(batch_id)) == (0, {})
    assert play.run(batch_id).status == Status.COMPLETED
    assert play.counts(batch_id)["completed"] == 1
    play.desk.grammars.close()


def test_an_ended_batch_cannot_be_cancelled(play: Play) -> None:
    batch_id = play.create(rows(1))
    play.run(batch_id)
    with pytest.raises(Conflict):
        play.cancel(batch_id)


def test_an_expired_batch_keeps_what_succeeded_and_names_the_rest(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advancing, "WINDOW_ROWS", 5)
    monkeypatch.setattr(advancing, "MAX_UNFINISHED", 10)
    batch_id = play.create(rows(12))
    play.steps(batch_id)
    play.work(batch_id, limit=3)
    play.let_expire(batch_id)
    batch = play.run(batch_id)
    assert batch.status == Status.EXPIRED
    assert (len(play.output(batch)), len(play.errors(batch))) == (3, 9)
    assert {line["error"]["code"] for line in play.errors(batch)} == {"batch_expired"}


# ---- what the client asks for


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "25d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "24"}, "completion_window"),
        ({"completion_window": "169h"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"webhook": {"url": "http://example.com/"}}, "webhook.url"),
        ({"webhook": {}}, "webhook.url"),
        ({"extra": 1}, "extra"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)
def test_a_wrong_field_is_refused_by_name(settings: Settings, fields: dict[str, Any], param: str) -> None:
    body = {"input_file_id": "file_1", "endpoint": TEXT, "completion_window": "24h"} | fields
    with pytest.raises(InvalidRequest) as refusal:
        batches.parse(body, settings)
    assert refusal.value.param == param


@pytest.mark.parametrize(("window", "hours"), [("1h", 1), ("24h", 24), ("7d", 168), ("168h", 168)])
def test_a_batch_expires_after_its_window(play: Play, window: str, hours: int) -> None:
    batch = play.batch(play.create(rows(1), completion_window=window))
    assert (batch.expires_at - batch.created_at).total_seconds() == hours * 3600


def test_a_file_of_another_purpose_is_refused(play: Play) -> None:
    file_id = play.upload(rows(1), purpose=files.BATCH_OUTPUT)
    request = batches.parse({"input_file_id": file_id, "endpoint": TEXT, "completion_window": "24h"}, play.settings)
    with pytest.raises(InvalidRequest), play.db.transaction() as session:
        batches.create(session, play.tenant_id, request, play.settings)


def test_too_many_open_batches_are_refused(play: Play) -> None:
    play.create(rows(1))
    few = play.settings.model_copy(update={"max_open_batches": 1})
    request = batches.parse({"input_file_id": play.upload(rows(1)), "endpoint": TEXT, "completion_window": "24h"}, few)
    with pytest.raises(QueueFull), play.db.transaction() as session:
        batches.create(session, play.tenant_id, request, few)


def test_somebody_elses_batch_is_none(play: Play, new_tenant: Callable[..., Any]) -> None:
    batch_id, other = play.create(rows(1)), new_tenant().tenant_id
    with play.db.transaction() as session:
        for act in (batches.find, batches.cancel):
            with pytest.raises(NotFound):
                act(session, other, batch_id)
        assert batches.page(session, other, after=None, limit=10) == []
        assert [batch.id for batch in batches.page(session, play.tenant_id, after=None, limit=10)] == [batch_id]


def test_the_end_of_a_batch_is_told_by_a_webhook(play: Play) -> None:
    batch_id = play.create(rows(2), webhook={"url": "https://example.com/hook"}, metadata={"a": "b"})
    batch = play.run(batch_id)
    with play.db.transaction() as session:
        delivery = session.scalars(select(Delivery).where(Delivery.job_id == batch_id)).one()
    told = json.loads(delivery.body)
    assert told["type"] == "batch.completed"
    assert told["data"]["output_file_id"] == batch.output_file_id
    assert told["data"]["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert told["data"]["metadata"] == {"a": "b"}


def test_jobs_of_a_batch_expire_with_it(play: Play) -> None:
    batch_id = play.create(rows(1), completion_window="1h")
    play.steps(batch_id)
    with play.db.transaction() as session:
        job = session.scalars(select(Job).where(Job.batch_id == batch_id)).one()
        assert 0 < (job.deadline_at - clock.now(session)).total_seconds() <= 3600
        assert job.tier == "bulk"


def test_a_batch_reads_as_many_rows_as_its_tenants_quota_allows(play: Play) -> None:
    """Each may use 3 tokens of prompt and 2 of output; the day's quota is for two of them."""
    lines = [row("a", "hey", max_tokens=2), row("b", "hey", max_tokens=2), row("big", "hey", max_tokens=50)]
    with play.db.transaction() as session:
        session.execute(update(Tenant).where(Tenant.id == play.tenant_id).values(tokens_per_day=11))
    batch_id = play.create([*lines, row("c", "hey", max_tokens=2)])
    play.steps(batch_id)
    assert play.jobs(batch_id) == {"queued": 2, "failed": 1}, "the big one never fits, the last waits"
    assert not play.step(batch_id)
    with play.db.transaction() as session:
        session.execute(update(Tenant).where(Tenant.id == play.tenant_id).values(tokens_per_day=15))
    batch = play.run(batch_id)
    assert (batch.status, play.counts(batch_id)) == (Status.COMPLETED, {"total": 4, "completed": 3, "failed": 1})
    (refused,) = play.errors(batch)
    assert refused["custom_id"] == "big" and refused["response"]["body"]["error"]["code"] == "quota_exceeded"
