"""Jobs with several choices, and with logprobs, in a real worker: whole, and charged alike everywhere."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from datetime import date

import pytest
from sqlalchemy import select

from app import choices, dispatch, events, tables, usage
from app.choices import Choice
from app.settlements import usage_of
from tests.site import Site
from tests.stopping import PROMPT_TOKENS, lengths, seed_with


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[subprocess.Popen[bytes]]:
    process = site.start_worker(echo_step_ms=5.0)
    yield process
    assert site.stop(process) == 0


def result(site: Site, job_id: str) -> list[Choice]:
    with site.db.transaction() as session:
        return choices.of_one(session, site.job(job_id))


def usages(site: Site, tenant_id: str, job_id: str) -> list[dict[str, int]]:
    """What a job was charged, by its terminal event, by itself, by its webhook, and by its tenant's ledger."""
    with site.db.transaction() as session:
        (last,) = events.replay(session, job_id, after=events.last_number(session, job_id) - 1)
        delivery = session.scalars(select(tables.Delivery).where(tables.Delivery.job_id == job_id)).one()
        (day,) = usage.usage(session, tenant_id, date(2000, 1, 1), date(2999, 12, 31))
    ledger = {name: getattr(day, name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return [last.data["usage"], usage_of(site.job(job_id)), json.loads(delivery.body)["data"]["usage"], ledger]


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("end", ["length", "stop", "cancel"])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_usage_is_the_same_in_stream_poll_webhook_and_ledger(site: Site, num_choices: int, end: str) -> None:
    tenant = site.new_tenant(f"{num_choices} {end}", tokens_per_day=10_000)
    seed = seed_with("q", *[(4, 40)] * num_choices)
    (job_id,) = site.run(
        tenant_id=tenant.tenant_id,
        num_choices=num_choices,
        max_tokens=2000 if end == "cancel" else 50,
        seed=seed,
        webhook_url="https://example.com/",
        **({"stop": ["q"]} if end == "stop" else {}),
    )
    if end == "cancel":
        site.wait_for(lambda: all(site.log(job_id, choice).text for choice in range(num_choices)))
        site.cancel(job_id, tenant.tenant_id)
    site.wait_until([job_id], "cancelled" if end == "cancel" else "succeeded")
    dispatch.settle(site.db)
    made = {
        "length": 50 * num_choices,
        "stop": sum(lengths(seed, "q", num_choices)),
        "cancel": len(site.log(job_id).token_ids),
    }[end]
    charge = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": made, "total_tokens": PROMPT_TOKENS + made}
    assert usages(site, tenant.tenant_id, job_id) == [charge] * 4
    for choice in result(site, job_id):
        assert choice.finish_reason == (None if end == "cancel" else end)
        assert choice.text == site.log(job_id, choice.index).text


@pytest.mark.usefixtures("worker")
def test_one_that_came_to_its_end_waits_for_the_others(site: Site) -> None:
    seed = seed_with("q", (40, 90), (1, 1), (2, 20))
    (job_id,) = site.run(num_choices=3, max_tokens=100, seed=seed, stop=["q"])
    site.wait_until([job_id], "succeeded")
    assert [len(choice.text) + 1 for choice in result(site, job_id)] == lengths(seed, "q", 3)
    with site.db.transaction() as session:
        told = [event.data for event in events.replay(session, job_id, after=0) if event.kind == "tokens"]
    ends = [data["index"] for data in told if data.get("finish_reason") == "stop"]
    assert ends == [1, 2, 0], "each choice tells its end with its last tokens"
    assert [data["index"] for data in told if data["index"] == 1] == [1]
