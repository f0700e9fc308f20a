"""A tier's line: what was handed back first, then the job of the tenant that has been served least.

Virtual token counters say who was served least: what a tenant's jobs cost, over its weight. A job is charged what it
is expected to cost as it leaves the line, and its settlement corrects that. A tenant that joins the line is lifted to
the least served of those that stand in it: time in which it wanted nothing earns it nothing.
Source: Sheng et al., Fairness in serving large language models, OSDI 2024, algorithm 2.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.orm import Session

from app.settlements import GENERATED_COST, PREFILLED_COST
from app.tables import Job
from app.tiers import Tier

SUSPECT_DEATHS = 2
"""A job under which so many workers died in a row is a suspect of killing them; Settings.max_deaths makes it poison."""

Numbered = Sequence[tuple[str, int]]
"""Job ids with their dispatch numbers."""

_NEVER_RAN = "status = 'queued' and dispatch_number is null and not handed_back and not awaits_parents"
_IN_LINE = f"{_NEVER_RAN} and model = :model and tier = :tier"
"""A job of the line that never ran; what the index jobs_in_line is made for."""

_WAITING = text(
    f"""
    select tier, in_line, handed_back from unnest(cast(:tiers as text[])) as asked (tier)
    cross join lateral (select
        exists (
            select from jobs where {_NEVER_RAN} and model = :model and tier = asked.tier
        ) as in_line,
        exists (
            select from jobs where status = 'queued' and dispatch_number is null and handed_back
            and model = :model and tier = asked.tier
        ) as handed_back
    ) as waiting
    """
)

_NUMBER_HANDED_BACK = text(
    """
    with chosen as materialized (
        select id from jobs
        where status = 'queued' and dispatch_number is null and handed_back and model = :model and tier = :tier
        and (deaths >= :suspect_deaths) = :suspects
        order by id
        limit :count
        for update skip locked
    ), numbered as materialized (
        select id, nextval('dispatch_numbers') as number from (select id from chosen order by id) as in_order
    )
    update jobs set dispatch_number = numbered.number, dispatched_at = clock_timestamp()
    from numbered where jobs.id = numbered.id
    returning jobs.id, jobs.dispatch_number as number
    """
)
"""Numbers are drawn row by row from the sorted rows: an update alone would draw them in the order of its own plan."""

_WALK = f"""
    with recursive walk (tenant_id) as (
        (
            select tenant_id from jobs
            where {_IN_LINE}
            order by tenant_id limit 1
        ) union all
        select (
            select tenant_id from jobs
            where {_IN_LINE}
            and tenant_id > walk.tenant_id
            order by tenant_id limit 1
        ) from walk where walk.tenant_id is not null
    )
"""
"""From tenant to tenant over the index, however many jobs each of them has in line."""

_WHO_WAITS = text(f"{_WALK} select tenant_id from walk where tenant_id is not null")

_TENANTS_IN_LINE = text(
    f"""
    {_WALK}
    select tenants.id, weight, coalesce(served, 0) as served, coalesce(in_line, false) as was_in_line, mean_generated
    from walk join tenants on tenants.id = walk.tenant_id
    left join token_counters on token_counters.tenant_id = tenants.id and model = :model and tier = :tier
    """
)

_LAST_START = text("select coalesce(max(last_start), 0) from token_counters where model = :model and tier = :tier")

_FIRST_JOBS = text(
    f"""
    select job.* from unnest(cast(:tenant_ids as text[])) as asked (tenant_id) cross join lateral (
        select id, tenant_id, prompt_tokens, (sampling->>'max_tokens')::int * num_choices as max_tokens, charged_cost,
            num_choices
        from jobs
        where {_IN_LINE}
        and tenant_id = asked.tenant_id
        order by id limit :count
    ) as job
    """
)

_OWN_BEFORE = text(
    f"""
    select count(*) from jobs
    where {_IN_LINE}
    and tenant_id = :tenant_id and id < :id
    """
)

_HANDED_BACK_BEFORE = text(
    """
    select count(*) from jobs
    where status = 'queued' and dispatch_number is null and handed_back and model = :model and tier = :tier
    and (cast(:id as text) is null or id < :id)
    """
)

_COUNT_FIRST = text(
    f"""
    select coalesce(sum(count), 0)::bigint
    from unnest(cast(:tenant_ids as text[]), cast(:most as bigint[])) as asked (tenant_id, most)
    cross join lateral (
        select count(*) from (
            select from jobs
            where {_IN_LINE}
            and tenant_id = asked.tenant_id
            limit most
        ) as first
    ) as counted
    """
)

_NUMBER = text(
    """
    with asked as (
        select * from unnest(
            cast(:ids as text[]), cast(:counters as float8[]), cast(:costs as float8[]), cast(:weights as float8[])
        ) with ordinality as asked (id, counter, cost, weight, place)
    ), chosen as materialized (
        select asked.* from jobs join asked on jobs.id = asked.id
        where status = 'queued' and dispatch_number is null and not awaits_parents
        order by jobs.id
        for update of jobs skip locked
    ), numbered as materialized (
        select *, nextval('dispatch_numbers') as number from (select * from chosen order by place) as in_order
    )
    update jobs set dispatch_number = numbered.number, dispatched_at = clock_timestamp(),
        counter = numbered.counter, charged_cost = coalesce(jobs.charged_cost, numbered.cost),
        charged_weight = coalesce(jobs.charged_weight, numbered.weight)
    from numbered where jobs.id = numbered.id
    returning jobs.id, jobs.dispatch_number as number
    """
)

_KEEP_COUNTERS = text(
    """
    insert into token_counters (model, tier, tenant_id, served, last_start, in_line)
    select :model, :tier, tenant_id, served, last_start, in_line
    from unnest(
        cast(:tenant_ids as text[]), cast(:served as float8[]), cast(:last_starts as float8[]),
        cast(:in_line as boolean[])
    ) as kept (tenant_id, served, last_start, in_line)
    on conflict (model, tier, tenant_id) do update set
        served = excluded.served,
        last_start = greatest(token_counters.last_start, excluded.last_start),
        in_line = excluded.in_line
    """
)

_LEAVE = text(
    f"""
    update token_counters set in_line = false
    where in_line and not exists (
        select from jobs
        where {_NEVER_RAN}
        and jobs.model = token_counters.model and jobs.tier = token_counters.tier
        and jobs.tenant_id = token_counters.tenant_id
    )
    """
)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The tiers of a model in which jobs wait to be dispatched."""

    in_line: frozenset[Tier]
    """Of jobs that never ran."""
    handed_back: frozenset[Tier]
    """Of jobs that ran before."""

    @property
    def tiers(self) -> list[Tier]:
        return [tier for tier in Tier if tier in self.in_line | self.handed_back]


def waiting(session: Session, model: str) -> Waiting:
    rows = session.execute(_WAITING, {"model": model, "tiers": [tier.value for tier in Tier]}).all()
    return Waiting(
        in_line=frozenset(Tier(row.tier) for row in rows if row.in_line),
        handed_back=frozenset(Tier(row.tier) for row in rows if row.handed_back),
    )


def who_waits(session: Session, model: str, tier: Tier) -> list[str]:
    """The tenants that have jobs in line."""
    return list(session.scalars(_WHO_WAITS, {"model": model, "tier": tier.value}))


def number_handed_back(session: Session, model: str, tier: Tier, count: int, *, suspects: bool = False) -> Numbered:
    """Draw dispatch numbers for up to count jobs that ran before, suspects or others, the oldest first."""
    rows = session.execute(
        _NUMBER_HANDED_BACK,
        {
            "model": model,
            "tier": tier.value,
            "count": count,
            "suspects": suspects,
            "suspect_deaths": SUSPECT_DEATHS,
        },
    )
    return sorted(((row.id, row.number) for row in rows), key=lambda job: job[1])


def number_next(session: Session, model: str, tier: Tier, count: int) -> Numbered:
    """Draw dispatch numbers for up to count choices of jobs that never ran, and charge their tenants' counters.

    The last job may have more than were left. The caller holds dispatch's lock.
    """
    if count <= 0:
        return []
    line = {"model": model, "tier": tier.value}
    tenants = _tenants(session, line)
    leaving = heapq.nsmallest(count, tenants.values(), key=lambda tenant: tenant.served)
    jobs: _Rest = {}
    # One more than may be taken: who has none left after this round stands in line no more.
    asked = {"tenant_ids": [tenant.id for tenant in leaving], "count": count + 1}
    for row in session.execute(_FIRST_JOBS, line | asked):
        tenant = tenants[row.tenant_id]
        cost = 0.0 if row.charged_cost is not None else tenant.expected_cost(row.prompt_tokens, row.max_tokens)
        jobs.setdefault(tenant.id, deque()).append(_First(row.id, cost, row.num_choices))
    chosen = _choose(tenants, jobs, count)
    rows = session.execute(
        _NUMBER,
        {
            "ids": [job.id for job in chosen],
            "counters": [job.counter for job in chosen],
            "costs": [job.cost for job in chosen],
            "weights": [tenants[job.tenant_id].weight for job in chosen],
        },
    )
    numbers = {row.id: row.number for row in rows}
    _keep_counters(session, line, tenants, [job for job in chosen if job.id in numbers], jobs)
    return [(job.id, numbers[job.id]) for job in chosen if job.id in numbers]


@dataclass(frozen=True, slots=True)
class Ahead:
    """How many jobs are to leave a line before one of it, as things stand."""

    handed_back: int = 0
    own: int = 0
    """Of the same tenant."""
    others: int = 0


def ahead(session: Session, job: Job) -> Ahead:
    """How many jobs leave the line before this one, which waits to be dispatched, if all cost what is expected."""
    line = {"model": job.model, "tier": job.tier}
    if job.handed_back:
        return Ahead(handed_back=session.execute(_HANDED_BACK_BEFORE, line | {"id": job.id}).scalar_one())
    handed_back: int = session.execute(_HANDED_BACK_BEFORE, line | {"id": None}).scalar_one()
    own: int = session.execute(_OWN_BEFORE, line | {"tenant_id": job.tenant_id, "id": job.id}).scalar_one()
    return Ahead(handed_back, own, _others_before(session, line, job, own))


def _others_before(session: Session, line: dict[str, str], job: Job, own: int) -> int:
    """Jobs of other tenants that are served before one that comes behind `own` jobs of its own tenant."""
    tenants = _tenants(session, line)
    if job.tenant_id not in tenants:
        return 0  # it has just left the line
    firsts = session.execute(_FIRST_JOBS, line | {"tenant_ids": list(tenants), "count": 1}).all()
    costs = {
        row.tenant_id: tenants[row.tenant_id].expected_cost(row.prompt_tokens, row.max_tokens)
        / tenants[row.tenant_id].weight
        for row in firsts
    }
    turn = tenants[job.tenant_id].served + own * costs.get(job.tenant_id, 0.0)
    most = {
        tenant_id: math.ceil((turn - tenants[tenant_id].served) / cost)
        for tenant_id, cost in costs.items()
        if tenant_id != job.tenant_id and tenants[tenant_id].served < turn
    }
    counted = {"tenant_ids": list(most), "most": list(most.values())}
    others: int = session.execute(_COUNT_FIRST, line | counted).scalar_one()
    return others


@dataclass(frozen=True, slots=True)
class _Tenant:
    """A tenant that stands in line."""

    id: str
    weight: float
    served: float
    """Its counter, after the lift: virtual tokens over its weight."""
    is_lifted: bool
    """It joined the line just now."""
    mean_generated: float | None

    def expected_cost(self, prompt_tokens: int, max_tokens: int) -> float:
        """What a job is charged until its settlement, in virtual tokens."""
        generated = max_tokens if self.mean_generated is None else min(max_tokens, self.mean_generated)
        return PREFILLED_COST * prompt_tokens + GENERATED_COST * generated


@dataclass(frozen=True, slots=True)
class _First:
    """One of a tenant's first jobs in line."""

    id: str
    cost: float
    """In virtual tokens; 0 if it was charged before, and its message was lost."""
    num_choices: int


_Rest = dict[str, deque[_First]]
"""By tenant, its first jobs that are still in line."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    id: str
    tenant_id: str
    counter: float
    """The tenant's, before this job is charged."""
    cost: float


def _tenants(session: Session, line: dict[str, str]) -> dict[str, _Tenant]:
    """Who stands in line, those lifted that joined it since the last dispatch."""
    rows = session.execute(_TENANTS_IN_LINE, line).all()
    stayed = [row.served for row in rows if row.was_in_line]
    least = min(stayed) if stayed else session.execute(_LAST_START, line).scalar_one()
    return {
        row.id: _Tenant(
            id=row.id,
            weight=row.weight,
            served=row.served if row.was_in_line else max(row.served, least),
            is_lifted=not row.was_in_line,
            mean_generated=row.mean_generated,
        )
        for row in rows
    }


def _choose(tenants: Mapping[str, _Tenant], jobs: _Rest, count: int) -> list[_Chosen]:
    """The next jobs, in order: always the first one of the tenant that was served least; of equals, the oldest job."""
    line = [(tenants[tenant_id].served, waiting[0].id, tenant_id) for tenant_id, waiting in jobs.items()]
    heapq.heapify(line)
    chosen: list[_Chosen] = []
    while line and count > 0:
        served, _, tenant_id = heapq.heappop(line)
        job = jobs[tenant_id].popleft()
        chosen.append(_Chosen(job.id, tenant_id, counter=served, cost=job.cost))
        count -= job.num_choices
        if jobs[tenant_id]:
            served += job.cost / tenants[tenant_id].weight
            heapq.heappush(line, (served, jobs[tenant_id][0].id, tenant_id))
    return chosen


def _keep_counters(
    session: Session, line: dict[str, str], tenants: Mapping[str, _Tenant], dispatched: Sequence[_Chosen], rest: _Rest
) -> None:
    """Write what this round changed: the counters of those served, and who is in line."""
    served = {tenant.id: tenant.served for tenant in tenants.values() if tenant.is_lifted}
    last_starts = dict.fromkeys(served, 0.0)
    for job in dispatched:
        tenant = tenants[job.tenant_id]
        served[tenant.id] = served.get(tenant.id, tenant.served) + job.cost / tenant.weight
        last_starts[tenant.id] = job.counter
    if served:
        session.execute(
            _KEEP_COUNTERS,
            line
            | {
                "tenant_ids": list(served),
                "served": list(served.values()),
                "last_starts": [last_starts[tenant_id] for tenant_id in served],
                "in_line": [bool(rest.get(tenant_id, True)) for tenant_id in served],
            },
        )


def leave(session: Session) -> None:
    """Note which tenants stand in no line any more, their last jobs cancelled or expired.

    The caller holds dispatch's lock.
    """
    session.execute(_LEAVE)
