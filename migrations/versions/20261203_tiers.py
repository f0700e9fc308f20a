"""Ended jobs are found by their end and may go, queued ones are found by tenant and tier; keys have a scope.

Revision ID: 71c4e0b82a5d
Revises: 5d7a2c90e318
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "71c4e0b82a5d"
down_revision = "5d7a2c90e318"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("jobs_of_tenant_queued", "jobs")
    op.create_index(
        "jobs_of_tenant_queued",
        "jobs",
        ["tenant_id", "tier"],
        postgresql_where=sa.text("status = 'queued' and batch_id is null"),
    )
    op.create_index("jobs_by_end", "jobs", ["finished_at"], postgresql_where=sa.text("finished_at is not null"))
    op.create_index("idempotency_records_by_job", "idempotency_records", ["job_id"])
    op.add_column("batches", sa.Column("completed_rows", sa.Integer(), nullable=True))
    op.add_column("batches", sa.Column("prompt_tokens", sa.BigInteger(), nullable=True))
    op.add_column("batches", sa.Column("completion_tokens", sa.BigInteger(), nullable=True))
    op.add_column("api_keys", sa.Column("scope", sa.Text(), server_default="jobs", nullable=False))
    op.create_check_constraint("api_keys_scope", "api_keys", "scope in ('jobs', 'admin')")
    op.alter_column("workers", "metrics_url", type_=sa.Text(), existing_nullable=True)


def downgrade() -> None:
    op.drop_constraint("api_keys_scope", "api_keys")
    op.drop_column("api_keys", "scope")
    for name in ("completion_tokens", "prompt_tokens", "completed_rows"):
        op.drop_column("batches", name)
    op.drop_index("idempotency_records_by_job", "idempotency_records")
    op.drop_index("jobs_by_end", "jobs")
    op.drop_index("jobs_of_tenant_queued", "jobs")
    op.create_index("jobs_of_tenant_queued", "jobs", ["tenant_id"], postgresql_where=sa.text("status = 'queued'"))
