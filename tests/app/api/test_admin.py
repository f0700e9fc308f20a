"""GET /v1/admin/shares, and who may ask."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import generate_latest
from sqlalchemy import update

from app import dispatch, tenants
from app.api.services import services_of
from app.db import Database
from app.ids import new_id
from app.settings import Settings
from app.shares import Served, fairness_index
from app.tables import Event, Job, Tenant
from app.tenants import Scope
from app.tiers import Plan, Tier
from app.vault import Vault


@pytest.fixture
def operator(db: Database, settings: Settings, call_as: Any) -> Any:
    """Calls with a key of the scope admin."""
    with db.transaction() as session:
        made = tenants.provision(session, Vault.open(settings), name=new_id("name"), plan=Plan.PAID, scope=Scope.ADMIN)
    return call_as(made)


def names(db: Database, *owners: Any) -> list[str]:
    with db.transaction() as session:
        return [session.get_one(Tenant, owner.tenant_id).name for owner in owners]


def asked(operator: Any) -> dict[str, Any]:
    answer = operator("GET", "/v1/admin/shares")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.get_json()
    return found


def test_a_key_opens_its_scope_alone(call: Any, operator: Any) -> None:
    for caller, method, path in ((call, "GET", "/v1/admin/shares"), (operator, "GET", "/v1/jobs")):
        answer = caller(method, path)
        assert (answer.status_code, answer.get_json()["error"]["code"]) == (403, "forbidden")
    assert operator.submit().status_code == 403


@pytest.mark.parametrize("value", ["0", "3601", "-1", "x", "", "1.5", "²", "9" * 5000])
def test_a_wrong_window_is_refused_by_its_name(operator: Any, value: str) -> None:
    answer = operator("GET", f"/v1/admin/shares?window_s={value}")
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (422, "window_s")


def test_shares_are_of_tokens_served_in_the_window(
    operator: Any, call_as: Any, new_tenant: Callable[..., Any], worker: Any, db: Database, app: Any
) -> None:
    first, second, free = new_tenant(), new_tenant(), new_tenant(Plan.FREE)
    for owner, text in ((first, "abc"), (second, "a"), (free, "abcdefgh")):
        worker.run(call_as(owner).submit(prompt="12").get_json()["id"], text)
    long_ago = call_as(first).submit(prompt="12").get_json()["id"]
    worker.run(long_ago, "xyz")
    with db.transaction() as session:
        past = timedelta(hours=2)
        ended = update(Job).where(Job.id == long_ago)
        session.execute(ended.values(started_at=Job.started_at - past, finished_at=Job.finished_at - past))
        session.execute(update(Event).where(Event.job_id == long_ago).values(created_at=Event.created_at - past))
    mine = names(db, first, second, free)
    told = {each["name"]: each for each in asked(operator)["tenants"] if each["name"] in mine}
    assert [(told[name]["prompt_tokens"], told[name]["completion_tokens"]) for name in mine] == [(2, 3), (2, 1), (2, 8)]
    tiers = asked(operator)["tiers"]
    assert sum(tier["share"] for tier in tiers.values()) == pytest.approx(1, abs=0.001)
    assert tiers["free"]["floor"] == 0.1 and tiers["free"]["tokens"] >= 10
    shares = [each["share_of_tier"] for each in asked(operator)["tenants"] if each["tier"] == "paid"]
    assert sum(shares) == pytest.approx(1, abs=0.01)
    scraped = generate_latest(services_of(app).get().metrics.registry).decode()
    assert 'everbatch_tier_share{tier="free"}' in scraped


def test_what_a_running_job_was_served_counts_and_who_waits_is_told(
    operator: Any, call_as: Any, new_tenant: Callable[..., Any], worker: Any, db: Database, app: Any
) -> None:
    running, waiting = new_tenant(), new_tenant()
    claim = worker.take(call_as(running).submit(prompt="1").get_json()["id"])
    worker.write(claim, "abcd", claim.last_event + 1)
    broker = services_of(app).get().broker
    for _ in range(40):  # more than the window of a tier
        call_as(waiting).submit()
    dispatch.dispatch(db, broker, "echo")
    told = {each["name"]: each for each in asked(operator)["tenants"]}
    runs, waits = names(db, running, waiting)
    assert (told[runs]["completion_tokens"], told[runs]["is_waiting"]) == (4, False)
    assert (told[waits]["completion_tokens"], told[waits]["is_waiting"]) == (0, True)


def test_the_fairness_index_is_of_those_that_wait_by_weight() -> None:
    def served(generated: int, weight: float = 1.0, *, is_waiting: bool = True) -> Served:
        return Served("t", "t", Tier.PAID, weight, 0, generated, is_waiting)

    assert fairness_index([]) is fairness_index([served(5)]) is fairness_index([served(0), served(0)]) is None
    assert fairness_index([served(5), served(9, is_waiting=False)]) is None
    assert fairness_index([served(10), served(20, weight=2.0)]) == pytest.approx(1)
    assert fairness_index([served(10), served(0), served(0), served(0)]) == pytest.approx(1 / 4)
