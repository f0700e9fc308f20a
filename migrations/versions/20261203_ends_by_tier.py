"""Ended jobs are found by tier and end: each tier keeps them for days of its own.

Revision ID: c2f96b1e7a04
Revises: 71c4e0b82a5d
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "c2f96b1e7a04"
down_revision = "71c4e0b82a5d"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _index_ends("tier", "finished_at")


def downgrade() -> None:
    _index_ends("finished_at")


def _index_ends(*columns: str) -> None:
    op.drop_index("jobs_by_end", "jobs")
    op.create_index("jobs_by_end", "jobs", list(columns), postgresql_where=sa.text("finished_at is not null"))
