"""First tables.

Revision ID: e632d44ccd34
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "e632d44ccd34"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(sa.schema.CreateSequence(sa.Sequence("dispatch_numbers")))
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("webhook_secret", sa.LargeBinary(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.CheckConstraint("plan in ('paid', 'free')", name="tenants_plan"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("free_slots", sa.Integer(), nullable=False),
        sa.Column("steps", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "started_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column(
            "heartbeat_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("dead", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("workers_alive", "workers", ["heartbeat_at"], unique=False, postgresql_where=sa.text("not dead"))
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("prefix"),
    )
    op.create_table(
        "deliveries",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), server_default=sa.text("'pending'"), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("response_status", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("delivered_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("status in ('pending', 'sending', 'delivered', 'dead')", name="deliveries_status"),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("deliveries_by_job", "deliveries", ["job_id"], unique=False)
    op.create_index(
        "deliveries_due",
        "deliveries",
        ["next_at"],
        unique=False,
        postgresql_where=sa.text("status in ('pending', 'sending')"),
    )
    op.create_table(
        "files",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("files_by_tenant", "files", ["tenant_id", "id"], unique=False)
    op.create_table(
        "idempotency_records",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
        ),
        sa.PrimaryKeyConstraint("tenant_id", "key"),
    )
    op.create_table(
        "batches",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("completion_window", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("input_file_id", sa.Text(), nullable=False),
        sa.Column("output_file_id", sa.Text(), nullable=True),
        sa.Column("error_file_id", sa.Text(), nullable=True),
        sa.Column("errors", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("metadata", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("webhook_url", sa.Text(), nullable=True),
        sa.Column("rows_read", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("bytes_read", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("total_rows", sa.Integer(), nullable=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("in_progress_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finalizing_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("completed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("expired_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancelling_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancelled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["input_file_id"],
            ["files.id"],
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("batches_by_tenant", "batches", ["tenant_id", "id"], unique=False)
    op.create_index(
        "batches_open",
        "batches",
        ["id"],
        unique=False,
        postgresql_where=sa.text("status in ('validating', 'in_progress', 'finalizing', 'cancelling')"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("model_revision", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("prompt_ids", sa.ARRAY(sa.Integer()), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("sampling", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("metadata", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("webhook_url", sa.Text(), nullable=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("deaths", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("tokens_at_death", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("dispatch_number", sa.BigInteger(), nullable=True),
        sa.Column("dispatched_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("claimed_number", sa.BigInteger(), nullable=True),
        sa.Column("handed_back", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("output_text", sa.LargeBinary(), nullable=True),
        sa.Column("completion_tokens", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("error", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("batch_id", sa.Text(), nullable=True),
        sa.Column("row_number", sa.Integer(), nullable=True),
        sa.Column("custom_id", sa.Text(), nullable=True),
        sa.CheckConstraint("(status = 'running') = (owner is not null)", name="jobs_owner"),
        sa.CheckConstraint(
            "status in ('queued', 'running', 'succeeded', 'failed', 'cancelled', 'expired')", name="jobs_status"
        ),
        sa.ForeignKeyConstraint(
            ["batch_id"],
            ["batches.id"],
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "jobs_by_batch",
        "jobs",
        ["batch_id", "row_number"],
        unique=True,
        postgresql_where=sa.text("batch_id is not null"),
    )
    op.create_index("jobs_by_tenant", "jobs", ["tenant_id", "id"], unique=False)
    op.create_index("jobs_claimed", "jobs", ["model", "tier", "claimed_number"], unique=False)
    op.create_index(
        "jobs_dispatched",
        "jobs",
        ["model", "tier", "dispatch_number"],
        unique=False,
        postgresql_where=sa.text("status = 'queued' and dispatch_number is not null"),
    )
    op.create_index(
        "jobs_of_tenant_queued", "jobs", ["tenant_id"], unique=False, postgresql_where=sa.text("status = 'queued'")
    )
    op.create_index("jobs_running", "jobs", ["owner"], unique=False, postgresql_where=sa.text("status = 'running'"))
    op.create_index(
        "jobs_unfinished",
        "jobs",
        ["deadline_at"],
        unique=False,
        postgresql_where=sa.text("status in ('queued', 'running')"),
    )
    op.create_index(
        "jobs_waiting",
        "jobs",
        ["model", "tier", sa.literal_column("handed_back desc"), "id"],
        unique=False,
        postgresql_where=sa.text("status = 'queued' and dispatch_number is null"),
    )
    op.create_table(
        "events",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("data", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("text", sa.LargeBinary(), nullable=True),
        sa.Column("token_ids", sa.ARRAY(sa.Integer()), nullable=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "number"),
    )


def downgrade() -> None:
    op.drop_table("events")
    op.drop_index(
        "jobs_waiting", table_name="jobs", postgresql_where=sa.text("status = 'queued' and dispatch_number is null")
    )
    op.drop_index("jobs_unfinished", table_name="jobs", postgresql_where=sa.text("status in ('queued', 'running')"))
    op.drop_index("jobs_running", table_name="jobs", postgresql_where=sa.text("status = 'running'"))
    op.drop_index("jobs_of_tenant_queued", table_name="jobs", postgresql_where=sa.text("status = 'queued'"))
    op.drop_index(
        "jobs_dispatched",
        table_name="jobs",
        postgresql_where=sa.text("status = 'queued' and dispatch_number is not null"),
    )
    op.drop_index("jobs_claimed", table_name="jobs")
    op.drop_index("jobs_by_tenant", table_name="jobs")
    op.drop_index("jobs_by_batch", table_name="jobs", postgresql_where=sa.text("batch_id is not null"))
    op.drop_table("jobs")
    op.drop_index(
        "batches_open",
        table_name="batches",
        postgresql_where=sa.text("status in ('validating', 'in_progress', 'finalizing', 'cancelling')"),
    )
    op.drop_index("batches_by_tenant", table_name="batches")
    op.drop_table("batches")
    op.drop_table("idempotency_records")
    op.drop_index("files_by_tenant", table_name="files")
    op.drop_table("files")
    op.drop_index(
        "deliveries_due", table_name="deliveries", postgresql_where=sa.text("status in ('pending', 'sending')")
    )
    op.drop_index("deliveries_by_job", table_name="deliveries")
    op.drop_table("deliveries")
    op.drop_table("api_keys")
    op.drop_index("workers_alive", table_name="workers", postgresql_where=sa.text("not dead"))
    op.drop_table("workers")
    op.drop_table("tenants")
    op.execute(sa.schema.DropSequence(sa.Sequence("dispatch_numbers")))
