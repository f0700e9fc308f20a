"""Two that want to end the same job at the same moment: one of them does, whole, and the other finds it done."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select, text, update

from app import dispatch, events, jobs
from app.claims import Claim
from app.db import Database
from app.errors import Conflict
from app.events import Delta
from app.tables import QuotaDay, Tenant

AT_ONCE = 4
"""Races that run beside each other."""
MOST = 10
"""Tokens that a job may use: a prompt of two and eight generated."""

_WHAT_IS_LEFT = text(
    """
    select status, output_text, completion_tokens,
        (select array_agg(number order by number) from events where job_id = jobs.id) as numbers,
        (select array_agg(kind order by number) from events where job_id = jobs.id) as kinds,
        (select count(*) from deliveries where job_id = jobs.id) as deliveries,
        (select count(*) from settlements where job_id = jobs.id) as settlements
    from jobs where tenant_id = :tenant_id
    """
)


@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_of_a_cancel_and_an_end_at_once_one_has_all_the_effect(
    db: Database, owner: Any, submit: Callable[..., str], new_worker: Callable[..., Any], rounds: int
) -> None:
    with db.transaction() as session:
        session.execute(update(Tenant).where(Tenant.id == owner.tenant_id).values(tokens_per_day=rounds * MOST))
    worker = new_worker(slots=rounds)
    job_ids = [submit(webhook_url="https://example.com/") for _ in range(rounds)]
    claims = worker.claim(*job_ids)
    first = [Delta(claim.job_id, claim.attempt, claim.last_event + 1, "abc", tuple(b"abc")) for claim in claims]
    with db.transaction() as session:
        assert len(events.append_tokens(session, worker.id, first)) == rounds

    def end(claim: Claim) -> bool:
        return bool(worker.end(claim, "de", claim.last_event + 2))

    def cancel(claim: Claim) -> bool:
        try:
            with db.transaction() as session:
                return bool(jobs.cancel(session, owner.tenant_id, claim.job_id)[1])
        except Conflict:
            return False

    with ThreadPoolExecutor(2 * AT_ONCE) as pool:
        racing = [
            pool.submit(race, act, claims[n::AT_ONCE], barrier)
            for n in range(AT_ONCE)
            for barrier in [threading.Barrier(2)]
            for act in (end, cancel)
        ]
        won = [each.result() for each in racing]
    for ended, cancelled in zip(won[::2], won[1::2], strict=True):
        assert all(one != other for one, other in zip(ended, cancelled, strict=True)), "one of the two, each time"
    num_ended, num_cancelled = (sum(sum(each) for each in won[side::2]) for side in (0, 1))
    assert min(num_ended, num_cancelled) >= 10, "both orders were seen"

    with db.transaction() as session:
        left = Counter(str(tuple(row)) for row in session.execute(_WHAT_IS_LEFT, {"tenant_id": owner.tenant_id}))
    whole = ("succeeded", b"abcde", 5, [1, 2, 3, 4, 5], ["queued", "running", "tokens", "tokens", "succeeded"], 1, 1)
    kept = ("cancelled", b"abc", 3, [1, 2, 3, 4], ["queued", "running", "tokens", "cancelled"], 1, 1)
    assert left == {str(whole): num_ended, str(kept): num_cancelled}
    dispatch.settle(db)
    with db.transaction() as session:
        quota = session.scalars(select(QuotaDay).where(QuotaDay.tenant_id == owner.tenant_id)).one()
    assert (quota.reserved, quota.used) == (0, 7 * num_ended + 5 * num_cancelled), "prompts of two, and what was shown"


def race(act: Callable[[Claim], bool], claims: Sequence[Claim], barrier: threading.Barrier) -> list[bool]:
    """Act on one claim after the other, each at the same moment as the other side; whether it had an effect."""
    won = []
    for claim in claims:
        barrier.wait(30)
        won.append(act(claim))
    return won
