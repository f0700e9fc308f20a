"""A job may wait for others, its parents.

Revision ID: 6f0c3a9e75d1
Revises: 5e90c3a7d81b
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "6f0c3a9e75d1"
down_revision = "5e90c3a7d81b"
branch_labels = None
depends_on = None

_NEVER_RAN = "status = 'queued' and dispatch_number is null and not handed_back"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("awaits_parents", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("jobs", sa.Column("depth", sa.SmallInteger(), server_default=sa.text("0"), nullable=False))
    _make_index(f"{_NEVER_RAN} and not awaits_parents")
    op.create_table(
        "outlines",
        sa.Column("job_id", sa.Text(), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("outline", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("most_prompt_tokens", sa.Integer(), nullable=False),
    )
    op.create_table(
        "parents",
        sa.Column("job_id", sa.Text(), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("parent_id", sa.Text(), primary_key=True),
        sa.Column("look_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
    )
    op.create_index("parents_by_parent", "parents", ["parent_id"])
    op.create_index("parents_due", "parents", ["look_at"])


def downgrade() -> None:
    op.drop_table("parents")
    op.drop_table("outlines")
    _make_index(_NEVER_RAN)
    op.drop_column("jobs", "depth")
    op.drop_column("jobs", "awaits_parents")


def _make_index(condition: str) -> None:
    op.drop_index("jobs_in_line", "jobs")
    op.create_index("jobs_in_line", "jobs", ["model", "tier", "tenant_id", "id"], postgresql_where=sa.text(condition))
