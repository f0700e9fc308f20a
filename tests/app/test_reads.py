"""How many jobs are read: a few, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest
from sqlalchemy import exists, select, text
from sqlalchemy.orm import Session

from app import recovery, releases, retention, shares
from app.db import Database
from app.tiers import TierTable

MODEL = f"model-{uuid4().hex}"
NUM_TENANTS = 200
NUM_JOBS = 6000
"""That have ended, and as many that wait."""

_TENANTS = text(
    """
    insert into tenants (id, name, plan, webhook_secret)
    select 'tenant_' || number, 'name ' || number, 'free', '' from generate_series(0, :num_tenants - 1) as number
    """
)
_JOBS = text(
    """
    insert into jobs (
        id, tenant_id, tier, model, model_revision, status, prompt_ids, prompt_tokens, sampling, deadline_at,
        started_at, finished_at, attempt, claimed_number
    )
    select 'job_' || status || number, 'tenant_' || mod(number, :num_tenants), 'free', :model, '', status, '{1}', 1,
        '{"max_tokens": 1}', clock_timestamp() + interval '1 hour', ended_at, ended_at, 0, number
    from generate_series(1, :num_jobs) as number
    cross join lateral (
        values ('queued', cast(null as timestamptz)), ('succeeded', clock_timestamp() - number * interval '1 minute')
    ) as kinds (status, ended_at)
    """
)
_READ = text("select seq_tup_read + coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables where relname = 'jobs'")


@pytest.fixture(scope="module")
def full(db: Database) -> Database:
    """A database with many jobs, whose planner knows of them."""
    with db.transaction() as session:
        session.execute(_TENANTS, {"num_tenants": NUM_TENANTS})
        session.execute(_JOBS, {"model": MODEL, "num_tenants": NUM_TENANTS, "num_jobs": NUM_JOBS})
    with db.autocommit() as session:
        session.execute(text("vacuum analyze jobs"))
    return db


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda session: session.scalar(select(exists().where(recovery.IS_EXPIRED))), id="is any late?"),
        pytest.param(lambda session: recovery.expire(session), id="expire"),
        pytest.param(lambda session: recovery.requeue_orphans(session, max_deaths=5), id="requeue orphans"),
        pytest.param(lambda session: retention.remove_bygone(session, TierTable()), id="remove bygone"),
        pytest.param(lambda session: releases.look(session, MODEL, limit=500), id="look at children"),
        pytest.param(lambda session: shares.served(session, MODEL, window_s=60), id="shares"),
    ],
)
def test_what_there_is_to_do_is_found_without_a_look_at_all_jobs(
    full: Database, ask: Callable[[Session], object]
) -> None:
    with full.transaction() as session:
        before = session.execute(_READ).scalar_one()
        ask(session)
        assert session.execute(_READ).scalar_one() - before < 100
