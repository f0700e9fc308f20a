"""Whose job is next: tenants share a tier by what their jobs cost, whatever the length of their lines."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import select, update

from app import claims, dispatch, jobs, line, moves, recovery, settlements
from app.db import Database
from app.jobs import Submission
from app.moves import Status
from app.settlements import GENERATED_COST, PREFILLED_COST
from app.tables import Job, Tenant, TokenCounter
from app.tiers import POLICIES, Tier, TierTable
from engine.policies import fair, tiered
from tests import submitting

PROMPT_TOKENS = 2
MAX_TOKENS = 8
COST = PREFILLED_COST * PROMPT_TOKENS + GENERATED_COST * MAX_TOKENS
"""Of a job that generates all that it may."""


@dataclass
class Line:
    """The free tier's line of a model of the test's own."""

    db: Database
    submission: Submission
    make_worker: Callable[..., Any]
    make_tenant: Callable[..., Any]

    def __post_init__(self) -> None:
        self.worker = self.make_worker(self.submission.model, 64)

    def tenant(self, *, weight: float = 1.0) -> str:
        tenant_id: str = self.make_tenant().tenant_id
        self.weigh(tenant_id, weight)
        return tenant_id

    def weigh(self, tenant_id: str, weight: float) -> None:
        with self.db.transaction() as session:
            session.execute(update(Tenant).where(Tenant.id == tenant_id).values(weight=weight))

    def submit(self, tenant_id: str, count: int = 1, *, max_tokens: int = MAX_TOKENS) -> list[str]:
        wanted = dataclasses.replace(self.submission, sampling={**self.submission.sampling, "max_tokens": max_tokens})
        with self.db.transaction() as session:
            return [submitting.submit(session, tenant_id, wanted, max_queued=10_000)[0].id for _ in range(count)]

    def leave(self, count: int) -> list[str]:
        """The next count jobs, taken from the line."""
        with self.db.transaction() as session:
            settlements.fold(session)
            return [job_id for job_id, _ in line.number_next(session, self.submission.model, Tier.FREE, count)]

    def run(self, job_ids: Sequence[str], *, generated: int = MAX_TOKENS) -> None:
        """To their ends, each with so many tokens."""
        for claim in self.worker.claim(*job_ids):
            self.worker.write(claim, "x" * generated, claim.last_event + 1)
            self.worker.finish(claim, finish_reason="length")

    def tenants_of(self, job_ids: Sequence[str]) -> list[str]:
        with self.db.transaction() as session:
            owners = dict(session.execute(select(Job.id, Job.tenant_id).where(Job.id.in_(job_ids))).all())
        return [owners[job_id] for job_id in job_ids]

    def served(self, tenant_id: str) -> float:
        with self.db.transaction() as session:
            settlements.fold(session)
            return session.scalars(select(TokenCounter.served).where(TokenCounter.tenant_id == tenant_id)).one()


@pytest.fixture
def free(db: Database, submission: Submission, new_worker: Callable[..., Any], new_tenant: Callable[..., Any]) -> Line:
    own = dataclasses.replace(submission, model=f"model-{uuid4().hex}", tier=Tier.FREE)
    return Line(db, own, new_worker, new_tenant)


def test_a_long_line_of_one_tenant_never_stands_before_anothers_first_job(free: Line) -> None:
    heavy, light = free.tenant(), free.tenant()
    backlog = free.submit(heavy, 300)
    assert free.leave(10) == backlog[:10]
    first = free.submit(light)
    assert free.leave(2) == [backlog[10], *first]  # of tenants that were served alike, the oldest job


def test_tenants_take_turns_and_each_ones_jobs_keep_their_order(free: Line) -> None:
    tenants = [free.tenant() for _ in range(3)]
    lines = {tenant: free.submit(tenant, 10) for tenant in tenants}
    left = [job_id for _ in range(3) for job_id in free.leave(6)]
    owners = free.tenants_of(left)
    assert Counter(owners) == dict.fromkeys(tenants, 6)
    assert {owner: [job_id for job_id, of in zip(left, owners, strict=True) if of == owner] for owner in tenants} == {
        tenant: line[:6] for tenant, line in lines.items()
    }


def test_weights_are_shares(free: Line) -> None:
    double, single = free.tenant(weight=2.0), free.tenant()
    free.submit(double, 30)
    free.submit(single, 30)
    assert Counter(free.tenants_of(free.leave(30))) == {double: 20, single: 10}


def test_what_counts_is_tokens_not_jobs(free: Line) -> None:
    long, short = free.tenant(), free.tenant()
    free.submit(long, 20, max_tokens=199)  # 2 + 2 · 199 = 400
    free.submit(short, 60, max_tokens=49)  # 2 + 2 · 49 = 100
    assert Counter(free.tenants_of(free.leave(50))) == {long: 10, short: 40}


def test_service_of_backlogged_tenants_stays_within_one_job_of_each_whatever_they_were_expected_to_cost(
    free: Line,
) -> None:
    early, full = free.tenant(), free.tenant()  # one stops after one token of each eight, the other never
    free.submit(early, 120)
    free.submit(full, 120)
    cost = {early: PREFILLED_COST * PROMPT_TOKENS + GENERATED_COST, full: COST}
    service = Counter[str]()
    for _ in range(20):
        for job_id in free.leave(4):
            (owner,) = free.tenants_of([job_id])
            free.run([job_id], generated=1 if owner == early else MAX_TOKENS)
            service[owner] += int(cost[owner])
    assert abs(service[early] - service[full]) <= 4 * COST  # a round of four is chosen before any of it is settled


def test_idleness_earns_nothing(free: Line) -> None:
    busy, late = free.tenant(), free.tenant()
    free.submit(busy, 40)
    free.leave(20)
    free.submit(late, 40)
    assert Counter(free.tenants_of(free.leave(10))) == {busy: 5, late: 5}


def test_idleness_of_a_tenant_whose_jobs_were_cancelled_earns_nothing(free: Line) -> None:
    busy, late = free.tenant(), free.tenant()
    free.submit(busy, 60)
    (cancelled,) = free.submit(late)
    free.leave(1)
    with free.db.transaction() as session:
        jobs.cancel(session, late, cancelled)
    dispatch.settle(free.db)
    free.leave(20)
    free.submit(late, 40)
    assert Counter(free.tenants_of(free.leave(10))) == {busy: 5, late: 5}


def test_who_comes_back_when_nobody_is_in_line_is_where_the_others_were(free: Line) -> None:
    busy, late = free.tenant(), free.tenant()
    free.submit(busy, 10)
    free.run(free.leave(10))
    assert free.leave(1) == []
    free.submit(busy, 10)
    free.submit(late, 10)
    owners = free.tenants_of(free.leave(10))
    assert Counter(owners) in ({busy: 5, late: 5}, {busy: 4, late: 6})  # busy's tenth job was charged, and started last


def test_the_settlement_corrects_what_was_expected(free: Line) -> None:
    tenant = free.tenant()
    job_ids = free.submit(tenant, 3)
    free.leave(1)
    assert free.served(tenant) == COST
    free.run(job_ids[:1], generated=3)
    assert free.served(tenant) == PREFILLED_COST * PROMPT_TOKENS + GENERATED_COST * 3
    free.leave(1)  # and the next is expected to be as short
    assert free.served(tenant) == 2 * (PREFILLED_COST * PROMPT_TOKENS + GENERATED_COST * 3)


def test_a_job_whose_message_was_lost_or_that_was_handed_back_is_charged_once(free: Line) -> None:
    tenant = free.tenant()
    (job_id,) = free.submit(tenant)
    assert free.leave(1) == [job_id]
    with free.db.transaction() as session:
        recovery.forget_lost_messages(session, free.submission.model, Tier.FREE, queue_is_empty=True, grace_s=0)
    assert free.leave(1) == [job_id]
    free.worker.claim(job_id)
    with free.db.transaction() as session:
        claims.hand_back(session, free.worker.id, [job_id])
    with free.db.transaction() as session:
        assert len(line.number_handed_back(session, free.submission.model, Tier.FREE, 5)) == 1
    assert free.served(tenant) == COST
    free.run([job_id])
    assert free.served(tenant) == COST


def test_a_lost_message_of_a_job_that_somebody_holds_is_left_for_later(free: Line) -> None:
    def forget() -> int:
        with free.db.transaction() as session:
            return recovery.forget_lost_messages(
                session, free.submission.model, Tier.FREE, queue_is_empty=True, grace_s=0
            )

    job_ids = free.leave(len(free.submit(free.tenant(), 2)))
    with free.db.transaction() as holder:
        moves.lock(holder, job_ids[:1])
        assert forget() == 1
    assert forget() == 1


def test_the_claim_carries_the_tenants_counter_and_weight(free: Line) -> None:
    tenant = free.tenant(weight=4.0)
    job_ids = free.submit(tenant, 2)
    free.leave(2)
    first, second = free.worker.claim(*job_ids)
    assert (first.counter, second.counter) == (0.0, COST / 4.0)
    assert first.weight == second.weight == 4.0


def test_a_change_of_weight_leaves_what_was_charged_before_it(free: Line) -> None:
    lowered, raised = free.tenant(), free.tenant()
    jobs_of = {tenant: free.submit(tenant) for tenant in (lowered, raised)}
    free.leave(2)
    assert free.served(lowered) == free.served(raised) == COST
    free.weigh(lowered, 0.1)
    free.weigh(raised, 10.0)
    with free.db.transaction() as session:
        jobs.cancel(session, lowered, *jobs_of[lowered])
    free.run(jobs_of[raised], generated=3)
    assert free.served(lowered) == 0.0
    assert free.served(raised) == PREFILLED_COST * PROMPT_TOKENS + GENERATED_COST * 3


def test_a_job_that_somebody_holds_is_left_in_line_and_not_charged(free: Line) -> None:
    tenant = free.tenant()
    job_ids = free.submit(tenant, 2)
    with free.db.transaction() as holder:
        moves.lock(holder, job_ids[:1])
        assert free.leave(2) == job_ids[1:]
        jobs.cancel(holder, tenant, job_ids[0])
    assert free.leave(2) == []
    assert free.served(tenant) == COST
    with free.db.transaction() as session:
        assert jobs.find(session, tenant, job_ids[0]).status == Status.CANCELLED


def test_the_engine_counts_alike_and_has_the_same_floors() -> None:
    assert (PREFILLED_COST, GENERATED_COST) == (fair.PREFILLED_COST, fair.GENERATED_COST)
    floors = {POLICIES[tier].rank: TierTable()[tier].floor for tier in Tier}
    assert {rank: floor for rank, floor in floors.items() if floor} == tiered.FLOORS
