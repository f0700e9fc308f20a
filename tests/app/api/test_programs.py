"""Jobs that name parents: they wait, are released with their parents' texts, or fail with them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import redis as redis_client
from sqlalchemy import select, update
from sqlalchemy.orm import undefer

from app import claims, dispatch, line, recovery, releases, retention
from app.broker import Broker
from app.claims import Finished
from app.db import Database
from app.events import Delta, append_tokens
from app.models import Model
from app.moves import Status
from app.programs import MAX_DEPTH, MAX_PARENTS
from app.prompts import Prompts
from app.settings import Settings
from app.tables import NOW, Job, Outline, Parent, QuotaDay
from app.tiers import Plan, Tier, TierTable
from worker.programs import Usher, advance_programs

IM_START, IM_END = 257, 258
NOBODY = f"job_{0:032x}"


@pytest.fixture(scope="module")
def prompts(model: Model) -> Prompts:
    return Prompts(model)


@pytest.fixture
def usher(db: Database, model: Model, prompts: Prompts, settings: Settings) -> Usher:
    return Usher(db, model, prompts, settings.max_body_bytes)


@pytest.fixture
def advance(usher: Usher, redis: redis_client.Redis) -> Callable[[], None]:
    """A round of the io worker."""
    return lambda: advance_programs(usher, redis, nudge=lambda: None)


@pytest.fixture
def ask(call: Any) -> Callable[..., str]:
    """Submits a job that must be taken; its id."""

    def submit(prompt: Any = None, **fields: Any) -> str:
        body = {"prompt": prompt, "max_tokens": 8, **fields}
        answer = call("POST", "/v1/jobs", json={name: value for name, value in body.items() if value is not None})
        assert answer.status_code == 202, answer.get_json()
        return str(answer.get_json()["id"])

    return submit


@pytest.fixture
def row(db: Database) -> Callable[[str], Job]:
    """A job as it is kept, with its prompt."""

    def read(job_id: str) -> Job:
        with db.transaction() as session:
            return session.scalars(select(Job).where(Job.id == job_id).options(undefer(Job.prompt_ids))).one()

    return read


def refused(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.get_json()["error"]["param"]


# ---- waiting


def test_a_child_waits_for_its_parents_and_runs_behind_the_last(
    call: Any, ask: Any, row: Any, worker: Any, advance: Any
) -> None:
    first, second = ask("one"), ask("two")
    child = ask("three", after=[first, second, first])
    assert call("GET", f"/v1/jobs/{child}").get_json()["queue"] == {
        "position": 2,
        "estimated_start_at": None,
        "reason": "parents",
    }
    worker.run(first, "a")
    advance()
    assert call("GET", f"/v1/jobs/{child}").get_json()["queue"]["position"] == 1
    assert worker.claim(child) == []
    deadline_at = row(child).deadline_at
    worker.run(second, "b")
    advance()
    assert call("GET", f"/v1/jobs/{child}").get_json()["queue"]["reason"] != "parents"
    claim = worker.take(child)
    assert bytes(claim.prompt_ids) == b"three"
    worker.end(claim, "done", claim.last_event + 1)
    job = call("GET", f"/v1/jobs/{child}").get_json()
    assert (job["status"], job["usage"]["prompt_tokens"]) == ("succeeded", 5)
    assert row(child).deadline_at == deadline_at, "it counts from the submission"


def test_a_child_whose_parents_have_ended_before_is_released_at_once(ask: Any, worker: Any, advance: Any) -> None:
    parent = ask("one")
    worker.run(parent, "a")
    child = ask("two", after=[parent])
    advance()
    assert bytes(worker.take(child).prompt_ids) == b"two"


def test_no_dispatch_and_no_line_counts_what_waits_for_parents(
    call: Any, ask: Any, db: Database, redis_url: str, owner: Any, worker: Any
) -> None:
    parent = ask("one")
    worker.take(parent)
    before = call("GET", "/v1/queue").get_json()["tiers"]["paid"]["queued"]
    child = ask("two", after=[parent])
    assert call("GET", "/v1/queue").get_json()["tiers"]["paid"]["queued"] == before
    broker = Broker(redis_url)
    dispatch.dispatch(db, broker, "echo")
    broker.close()
    with db.transaction() as session:
        assert session.get_one(Job, child).dispatch_number is None
        assert owner.tenant_id not in line.who_waits(session, "echo", Tier.PAID)


def test_a_waiting_child_is_cancelled_and_deleted_as_any_job(call: Any, ask: Any, advance: Any, db: Database) -> None:
    parent = ask("one")
    cancelled, deleted = ask("two", after=[parent]), ask("three", after=[parent])
    assert call("POST", f"/v1/jobs/{cancelled}/cancel").get_json()["status"] == "cancelled"
    assert call("DELETE", f"/v1/jobs/{deleted}").status_code == 200
    call("POST", f"/v1/jobs/{parent}/cancel")
    advance()
    assert call("GET", f"/v1/jobs/{cancelled}").get_json()["status"] == "cancelled"
    with db.transaction() as session:
        for table in (Parent, Outline):
            assert session.scalars(select(table).where(table.job_id.in_([cancelled, deleted]))).all() == []


def test_a_waiting_child_expires(call: Any, ask: Any, expire_now: Any, advance: Any, db: Database) -> None:
    child = ask("two", after=[ask("one")])
    expire_now(child)
    with db.transaction() as session:
        recovery.expire(session)
    advance()
    assert call("GET", f"/v1/jobs/{child}").get_json()["status"] == "expired"


# ---- texts


def test_a_quote_is_the_text_of_the_first_choice(ask: Any, worker: Any, advance: Any, db: Database) -> None:
    parent = ask("one", n=2)
    claim = worker.take(parent)
    with db.transaction() as session:
        for number, choice in enumerate((1, 0), claim.last_event + 1):
            text = f"choice {choice}"
            delta = Delta(parent, claim.attempt, number, text, tuple(text.encode()), choice=choice)
            assert append_tokens(session, worker.id, [delta])
    worker.finish(claim)
    child = ask(["Say ", {"quote": parent}, " and ", {"quote": parent}, "."])
    advance()
    assert bytes(worker.take(child).prompt_ids) == b"Say choice 0 and choice 0."


def test_a_quote_in_a_message_is_no_control_token(ask: Any, worker: Any, advance: Any) -> None:
    parent = ask("one")
    worker.run(parent, "x<|im_end|>")
    content = ["<", {"quote": parent}, {"type": "text", "text": ">"}]
    child = ask(messages=[{"role": "user", "content": content}])
    advance()
    assert worker.take(child).prompt_ids == (
        IM_START, *b"user\n<x<|im_end|>>", IM_END, *b"\n", IM_START, *b"assistant\n",
    )  # fmt: skip


def test_a_continued_job_is_the_beginning_of_the_prompt(ask: Any, worker: Any, advance: Any) -> None:
    parent = ask("Once")
    worker.run(parent, " upon", " a")
    texts = {ask(" time", **{"continue": parent}): b"Once upon a time", ask(**{"continue": parent}): b"Once upon a"}
    texts[ask([" ", {"quote": parent}], **{"continue": parent})] = b"Once upon a  upon a"
    texts[ask([1, 2], **{"continue": parent})] = b"Once upon a\x01\x02"
    advance()
    for child, prompt in texts.items():
        assert bytes(worker.take(child).prompt_ids) == prompt


def test_a_continued_chat_has_its_turn_closed_once(ask: Any, worker: Any, advance: Any) -> None:
    parent = ask(messages=[{"role": "user", "content": "Hi"}])
    claim = worker.take(parent)
    worker.end(claim, "Hello", claim.last_event + 1, token_ids=(*b"Hello", IM_END))
    child = ask(messages=[{"role": "user", "content": ["Why ", {"quote": parent}, "?"]}], **{"continue": parent})
    advance()
    assert worker.take(child).prompt_ids == (
        *claim.prompt_ids, *b"Hello", IM_END, *b"\n",
        IM_START, *b"user\nWhy Hello?", IM_END, *b"\n", IM_START, *b"assistant\n",
    )  # fmt: skip


def test_what_a_stop_string_hid_is_not_continued(ask: Any, worker: Any, advance: Any) -> None:
    parent = ask("a", stop="END")
    claim = worker.take(parent)
    worker.end(claim, "bc", claim.last_event + 1, token_ids=b"bcEND")
    child = ask("d", **{"continue": parent})
    advance()
    assert bytes(worker.take(child).prompt_ids) == b"abcd"


# ---- failing


@pytest.fixture
def ends(call: Any, worker: Any, db: Database, expire_now: Any, advance: Any) -> dict[str, Callable[[str], object]]:
    """Ways in which a parent may not succeed."""

    def fail(job_id: str) -> None:
        worker.finish(worker.take(job_id), Status.FAILED, None)

    def expire(job_id: str) -> None:
        expire_now(job_id)
        with db.transaction() as session:
            recovery.expire(session)

    def remove(job_id: str) -> None:
        worker.run(job_id, "a")
        advance()  # its end has been seen, and others are waited for
        call("DELETE", f"/v1/jobs/{job_id}")

    return {
        "failed": fail,
        "expired": expire,
        "was cancelled": lambda job_id: call("POST", f"/v1/jobs/{job_id}/cancel"),
        "was deleted": remove,
    }


@pytest.mark.parametrize("became", ["failed", "expired", "was cancelled", "was deleted"])
def test_a_child_fails_with_its_parent_and_so_do_its_children(
    call: Any, ask: Any, advance: Any, ends: Any, became: str
) -> None:
    parent, other = ask("one"), ask("other")
    child = ask([{"quote": parent}], after=[other])
    grandchild = ask("three", **{"continue": child})
    ends[became](parent)
    advance()
    for job_id, named, said in ((child, parent, became), (grandchild, child, "failed")):
        job = call("GET", f"/v1/jobs/{job_id}").get_json()
        error = {"code": "parent_failed", "message": f"Its parent '{named}' {said}", "parent": named}
        assert (job["status"], job["error"], job["usage"]["total_tokens"]) == ("failed", error, 0)
        assert [each["status"] for each in events_of(call, job_id)] == ["queued", "failed"]


def events_of(call: Any, job_id: str) -> list[Any]:
    stream = call("GET", f"/v1/jobs/{job_id}/events").get_data(as_text=True)
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]


def test_a_prompt_that_does_not_fit_with_its_parents_texts_fails_its_job(
    call: Any, ask: Any, worker: Any, advance: Any
) -> None:
    parent = ask("one", max_tokens=4000)
    child = ask([{"quote": parent}, {"quote": parent}], max_tokens=500)
    fits = ask([{"quote": parent}, {"quote": parent}], max_tokens=None)
    worker.run(parent, "x" * 4000)
    advance()
    job = call("GET", f"/v1/jobs/{child}").get_json()
    assert (job["status"], job["error"]["code"]) == ("failed", "prompt_too_long")
    assert "8000 tokens" in job["error"]["message"]
    assert worker.take(fits).sampling["max_tokens"] == 8192 - 8000


def test_a_quoted_text_is_no_larger_than_a_body(
    call: Any, ask: Any, worker: Any, usher: Usher, db: Database, model: Model, prompts: Prompts
) -> None:
    parent = ask("one")
    child = ask([{"quote": parent}, {"quote": parent}])
    worker.run(parent, "x" * 6)
    Usher(db, model, prompts, max_text_bytes=11).advance()
    assert call("GET", f"/v1/jobs/{child}").get_json()["error"]["code"] == "prompt_too_long"


def test_a_prompt_that_comes_out_empty_fails_its_job(call: Any, ask: Any, worker: Any, advance: Any) -> None:
    parent = ask("one")
    child = ask([{"quote": parent}])
    worker.run(parent)
    advance()
    error = {"code": "invalid_request", "message": "prompt must not be empty", "param": "prompt"}
    assert call("GET", f"/v1/jobs/{child}").get_json()["error"] == error


# ---- what is refused


def test_who_is_named_must_be_the_tenants_own(call: Any, ask: Any, call_as: Any, new_tenant: Any) -> None:
    others = call_as(new_tenant(Plan.PAID)).submit().get_json()["id"]
    own = ask("one")
    for job_id in (others, NOBODY, "job_x", "", "\u2028"):
        for field, named in {
            "after[1]": {"after": [own, job_id]},
            "continue": {"continue": job_id},
            "prompt[1].quote": {"prompt": ["x", {"quote": job_id}]},
        }.items():
            answer = call.submit(**named)
            assert refused(answer) == (404, field)
            assert answer.get_json()["error"]["message"] == f"{field}: there is no job '{job_id}'"
        chat = [{"role": "user", "content": "x"}, {"role": "user", "content": [{"quote": own}, {"quote": job_id}]}]
        assert refused(call("POST", "/v1/jobs", json={"messages": chat})) == (404, "messages[1].content[1].quote")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"after": "job_x"}, "after"),
        ({"after": [1]}, "after[0]"),
        ({"after": [NOBODY] * (MAX_PARENTS + 1)}, "after"),
        ({"continue": [NOBODY]}, "continue"),
        ({"continues": NOBODY}, "continues"),
        ({"prompt": None}, "prompt"),
        ({"messages": [{"role": "user", "content": "x"}], "continue": NOBODY}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt[0]"),
        ({"prompt": ["a", {"quote": 5}]}, "prompt[1].quote"),
        ({"prompt": ["a", {"quote": NOBODY, "choice": 1}]}, "prompt[1].choice"),
        ({"prompt": [5, {"quote": NOBODY}]}, "prompt[0]"),
        ({"prompt": [{}]}, "prompt[0].quote"),
        ({"prompt": None, "messages": [{"role": "user", "content": ["a", 5]}]}, "messages[0].content[1]"),
        ({"prompt": None, "messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].quote"),
        (
            {"prompt": None, "messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        ({"prompt": None, "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"prompt": None, "messages": [{"role": "user", "content": [{"quote": 1}]}]}, "messages[0].content[0].quote"),
    ],
)
def test_a_wrong_shape_is_refused_by_its_field(call: Any, body: dict[str, Any], field: str) -> None:
    assert refused(call.submit(**body)) == (422, field)


def test_there_are_so_many_parents_and_no_more(call: Any, ask: Any) -> None:
    parents = [ask("x") for _ in range(MAX_PARENTS + 1)]
    ask([{"quote": parents[0]}], after=parents[:-1])
    assert refused(call.submit(prompt=[{"quote": parents[-1]}], after=parents[:-1])) == (422, "prompt[0].quote")


def test_so_many_jobs_wait_one_for_the_other_and_no_more(call: Any, ask: Any, db: Database) -> None:
    deep = ask("one", after=[ask("zero")])
    with db.transaction() as session:
        assert session.get_one(Job, deep).depth == 1
        session.execute(update(Job).where(Job.id == deep).values(depth=MAX_DEPTH - 1))
    deepest = ask("two", after=[deep])
    assert refused(call.submit(after=[deepest])) == (422, "after[0]")
    call("POST", f"/v1/jobs/{deepest}/cancel")
    ask("three", after=[deepest])  # what has ended is no depth


def test_own_texts_that_do_not_fit_are_refused_at_once(call: Any, ask: Any) -> None:
    parent = ask("one")
    assert refused(call.submit(prompt=["x" * 8192, {"quote": parent}])) == (422, "prompt")
    assert refused(call.submit(prompt=["x" * 8000, {"quote": parent}], max_tokens=193)) == (422, "max_tokens")


def test_another_models_job_is_quoted_and_not_continued(call: Any, ask: Any, db: Database) -> None:
    parent = ask("one")
    with db.transaction() as session:
        session.execute(update(Job).where(Job.id == parent).values(model_revision="another"))
    ask([{"quote": parent}])
    assert refused(call.submit(**{"continue": parent})) == (422, "continue")


# ---- keys


def test_a_replay_finds_its_job_also_when_the_parent_is_gone(call: Any, ask: Any) -> None:
    parent = ask("one")
    headers = {"Idempotency-Key": f"key {parent}"}
    first = call.submit(after=[parent], headers=headers)
    call("DELETE", f"/v1/jobs/{parent}")
    again = call.submit(after=[parent], headers=headers)
    assert (again.status_code, again.get_json()["id"]) == (202, first.get_json()["id"])
    assert again.headers["Idempotent-Replayed"] == "true"
    assert call.submit(headers=headers, after=[NOBODY]).get_json()["error"]["code"] == "idempotency_key_reused"


# ---- quotas


@pytest.fixture
def day(db: Database, owner: Any) -> Callable[[], tuple[int, int]]:
    """What the tenant has reserved and used."""

    def read() -> tuple[int, int]:
        dispatch.settle(db)
        with db.transaction() as session:
            found = session.scalars(select(QuotaDay).where(QuotaDay.tenant_id == owner.tenant_id)).one()
            return found.reserved, found.used

    return read


def test_a_child_reserves_the_worst_case_and_settles_what_it_used(
    call: Any, ask: Any, limit: Any, day: Any, worker: Any, advance: Any
) -> None:
    limit(tokens_per_day=200)
    parent = ask("12345", max_tokens=10)  # 15
    child = ask(["ab", {"quote": parent}, {"quote": parent}], max_tokens=7, n=2)  # 2 + 2 × 10 + 2 × 7 = 36
    assert day() == (15 + 36, 0)
    continuing = ask("abc", max_tokens=4, **{"continue": child})  # 22 and 7 of the parent, 3 and 4 of its own
    assert day() == (15 + 36 + 36, 0)
    assert call.submit(prompt=[{"quote": parent}] * 10, max_tokens=14).get_json()["error"]["code"] == "quota_exceeded"
    worker.run(parent, "x")
    advance()
    assert day() == (36 + 36, 6)
    worker.run(child, "yyy")
    advance()
    assert day() == (36, 6 + 4 + 3)
    worker.run(continuing)
    assert day() == (0, 6 + 7 + 4 + 3 + 3)


def test_a_text_of_more_tokens_than_it_was_generated_with_reserves_them_or_fails(
    call: Any, ask: Any, limit: Any, day: Any, worker: Any, advance: Any
) -> None:
    limit(tokens_per_day=60)
    parent = ask("1", max_tokens=1)
    first, second = (ask([{"quote": parent}], max_tokens=1) for _ in range(2))
    assert day() == (2 + 2 + 2, 0)
    claim = worker.take(parent)
    worker.end(claim, "x" * 30, claim.last_event + 1, token_ids=[7])
    advance()
    assert day() == (31, 2)
    assert len(worker.take(first).prompt_ids) == 30
    job = call("GET", f"/v1/jobs/{second}").get_json()
    assert (job["status"], job["error"]["code"]) == ("failed", "quota_exceeded")


# ---- whoever looks, and whenever


def test_several_io_workers_release_a_child_once(
    ask: Any, worker: Any, usher: Usher, redis: redis_client.Redis, row: Any
) -> None:
    parent = ask("p")
    children = [ask(["c", {"quote": parent}]) for _ in range(20)]
    worker.run(parent, "q")
    with ThreadPoolExecutor(4) as pool:
        rounds = [pool.submit(advance_programs, usher, redis, nudge=lambda: None) for _ in range(8)]
    for each in rounds:
        each.result()
    advance_programs(usher, redis, nudge=lambda: None)
    for child in children:
        assert (row(child).status, bytes(row(child).prompt_ids), row(child).prompt_tokens) == ("queued", b"cq", 2)


def test_a_release_that_comes_late_changes_nothing(
    ask: Any, worker: Any, usher: Usher, db: Database, advance: Any, model: Model
) -> None:
    parent = ask("p")
    child = ask(["c", {"quote": parent}])
    worker.run(parent, "q")
    late = usher._rendered(child)
    assert isinstance(late, releases.Rendered)
    advance()
    for status in ("queued", "succeeded"):
        with db.transaction() as session:
            session.execute(update(Job).where(Job.id == child).values(prompt_tokens=5))
            assert releases.release(session, [late]) == []
            assert releases.fail(session, {child: {"code": "parent_failed", "message": ""}}) == []
            found = session.get_one(Job, child, populate_existing=True)
            assert (found.status, found.prompt_tokens) == (status, 5)
        if status == "queued":
            worker.run(child, "r")


def test_ends_deletions_and_looks_at_once_stand_in_each_others_way_nowhere(
    call: Any, ask: Any, new_worker: Any, usher: Usher, redis: redis_client.Redis, db: Database, advance: Any, row: Any
) -> None:
    dice, worker = random.Random(0), new_worker(slots=64)
    parents = [ask("p") for _ in range(24)]
    children = {ask("c", after=named): named for _ in range(60) if (named := dice.sample(parents, dice.randint(2, 6)))}
    deleted = set(list(children)[::6])
    attempts = {parent: worker.take(parent).attempt for parent in parents}
    failed = set(parents[::8])

    def end(together: list[str]) -> None:
        ends = [
            Finished(parent, attempts[parent], Status.FAILED if parent in failed else Status.SUCCEEDED)
            for parent in together
        ]
        with db.transaction() as session:
            claims.finish(session, worker.id, ends)

    dice.shuffle(parents)
    work: list[Callable[[], object]] = [partial(end, parents[start : start + 4]) for start in range(0, 24, 4)]
    work += [partial(call, "DELETE", f"/v1/jobs/{child}") for child in deleted]
    work += [partial(advance_programs, usher, redis, nudge=lambda: None)] * 12
    dice.shuffle(work)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(each) for each in work]:
            done.result()
    with db.transaction() as session:  # as by and by
        session.execute(update(Parent).values(look_at=NOW))
    advance()
    for child, named in children.items():
        if child not in deleted:
            found = row(child)
            assert found.status == ("failed" if failed & set(named) else "queued")
            assert found.awaits_parents == (found.status == "failed")
    with db.transaction() as session:
        assert session.scalars(select(Parent).where(Parent.job_id.in_(children))).all() == []


def test_a_parent_that_ends_during_a_look_is_looked_at_again(
    ask: Any, worker: Any, db: Database, advance: Any, row: Any
) -> None:
    parent = ask("p")
    child = ask("c", after=[parent])
    with db.autocommit() as session:
        look = releases.look(session, "echo", limit=1000)
        assert child in look.waiting
        worker.run(parent, "q")
        releases.look_later(session, look.seen)
    advance()
    assert not row(child).awaits_parents


def test_a_child_whose_parents_end_was_missed_is_looked_at_by_and_by(
    ask: Any, worker: Any, db: Database, advance: Any, row: Any
) -> None:
    parent = ask("p")
    child = ask("c", after=[parent])
    advance()
    with db.transaction() as session:
        (edge,) = session.scalars(select(Parent).where(Parent.job_id == child))
        assert timedelta(0) < edge.look_at - row(child).created_at < timedelta(minutes=2)
        missed = edge.look_at
    worker.run(parent, "q")
    with db.transaction() as session:  # as if the parent's end had not seen the child
        session.execute(update(Parent).where(Parent.job_id == child).values(look_at=missed))
    advance()
    assert row(child).awaits_parents
    with db.transaction() as session:
        session.execute(update(Parent).where(Parent.job_id == child).values(look_at=NOW))
    advance()
    assert not row(child).awaits_parents


def test_a_parents_text_is_kept_for_a_child_that_waits(
    ask: Any, worker: Any, db: Database, advance: Any, row: Any, call: Any
) -> None:
    parent, other = ask("p"), ask("o")
    child = ask([{"quote": parent}], after=[other])
    worker.run(parent, "q")
    with db.transaction() as session:
        old = Job.finished_at - timedelta(days=100)
        session.execute(update(Job).where(Job.id == parent).values(finished_at=old))
        retention.remove_bygone(session, TierTable())
    worker.run(other)
    advance()
    assert bytes(row(child).prompt_ids) == b"q"
    with db.transaction() as session:
        retention.remove_bygone(session, TierTable())
    assert call("GET", f"/v1/jobs/{parent}").status_code == 404


def test_what_cannot_be_rendered_holds_up_nobody_else(
    ask: Any, worker: Any, db: Database, advance: Any, row: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = ask("p")
    bad, good = ask("b", after=[parent]), ask("g", after=[parent])
    worker.run(parent, "q")
    with db.transaction() as session:
        session.execute(update(Outline).where(Outline.job_id == bad).values(outline={}))
    advance()
    assert (row(bad).awaits_parents, row(good).awaits_parents) == (True, False)
