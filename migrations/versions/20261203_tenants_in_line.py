"""Tenants share a tier by token counters, and jobs that ended are settled and billed by the day.

Revision ID: 9b8e52d47c10
Revises: 3f0d9b6c2a71
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "9b8e52d47c10"
down_revision = "3f0d9b6c2a71"
branch_labels = None
depends_on = None

_WAITS = "status = 'queued' and dispatch_number is null"


def upgrade() -> None:
    op.add_column("tenants", sa.Column("weight", sa.Float(), server_default="1", nullable=False))
    op.create_check_constraint("tenants_weight", "tenants", "weight > 0")
    op.add_column("jobs", sa.Column("counter", sa.Float(), server_default="0", nullable=False))
    op.add_column("jobs", sa.Column("charged_cost", sa.Float(), nullable=True))
    op.drop_index("jobs_waiting", "jobs")
    op.create_index(
        "jobs_in_line",
        "jobs",
        ["model", "tier", "tenant_id", "id"],
        postgresql_where=sa.text(f"{_WAITS} and not handed_back"),
    )
    op.create_index(
        "jobs_handed_back", "jobs", ["model", "tier", "id"], postgresql_where=sa.text(f"{_WAITS} and handed_back")
    )
    op.create_table(
        "token_counters",
        sa.Column("model", sa.Text(), primary_key=True),
        sa.Column("tier", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenants.id"), primary_key=True),
        sa.Column("served", sa.Float(), nullable=False),
        sa.Column("last_start", sa.Float(), nullable=False),
        sa.Column("in_line", sa.Boolean(), nullable=False),
        sa.Column("mean_generated", sa.Float(), nullable=True),
    )
    op.create_index(
        "token_counters_in_line",
        "token_counters",
        ["model", "tier", "tenant_id"],
        postgresql_where=sa.text("in_line"),
    )
    op.create_table(
        "settlements",
        sa.Column("job_id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("charged_cost", sa.Float(), nullable=False),
    )
    op.create_index("settlements_by_tenant", "settlements", ["tenant_id", "day"])
    op.create_table(
        "usage_days",
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenants.id"), primary_key=True),
        sa.Column("day", sa.Date(), primary_key=True),
        sa.Column("model", sa.Text(), primary_key=True),
        sa.Column("tier", sa.Text(), primary_key=True),
        sa.Column("jobs", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
    )
    op.execute(
        """
        insert into usage_days (tenant_id, day, model, tier, jobs, prompt_tokens, completion_tokens)
        select tenant_id, (created_at at time zone 'UTC')::date, model, tier,
            count(*), coalesce(sum(prompt_tokens) filter (where attempt > 0), 0), sum(completion_tokens)
        from jobs where status not in ('queued', 'running')
        group by 1, 2, 3, 4
        """
    )


def downgrade() -> None:
    op.drop_table("usage_days")
    op.drop_table("settlements")
    op.drop_table("token_counters")
    op.drop_index("jobs_handed_back", "jobs")
    op.drop_index("jobs_in_line", "jobs")
    op.create_index(
        "jobs_waiting",
        "jobs",
        ["model", "tier", sa.text("handed_back desc"), "id"],
        postgresql_where=sa.text(_WAITS),
    )
    op.drop_column("jobs", "charged_cost")
    op.drop_column("jobs", "counter")
    op.drop_constraint("tenants_weight", "tenants")
    op.drop_column("tenants", "weight")
