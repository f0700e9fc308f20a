"""Batches know their lines, find a custom_id again, and do not hold their input file for ever.

Revision ID: 7c1b5a0f9d2e
Revises: e632d44ccd34
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "7c1b5a0f9d2e"
down_revision = "e632d44ccd34"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", sa.Column("lines_read", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.drop_constraint("batches_input_file_id_fkey", "batches", type_="foreignkey")
    op.create_index(
        "jobs_by_custom_id", "jobs", ["batch_id", "custom_id"], postgresql_where=sa.text("custom_id is not null")
    )
    op.create_index(
        "jobs_of_batch_unfinished",
        "jobs",
        ["batch_id"],
        postgresql_where=sa.text("batch_id is not null and status in ('queued', 'running')"),
    )


def downgrade() -> None:
    op.drop_index("jobs_of_batch_unfinished", table_name="jobs")
    op.drop_index("jobs_by_custom_id", table_name="jobs")
    op.create_foreign_key("batches_input_file_id_fkey", "batches", "files", ["input_file_id"], ["id"])
    op.drop_column("batches", "lines_read")
