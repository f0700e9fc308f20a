"""A job remembers how it was asked for in OpenAI's words.

Revision ID: 5e90c3a7d81b
Revises: 2b6f81d40c9e
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "5e90c3a7d81b"
down_revision = "2b6f81d40c9e"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("asked", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "asked")
