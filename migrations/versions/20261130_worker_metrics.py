"""Workers say where their metrics are.

Revision ID: 3f0d9b6c2a71
Revises: 7c1b5a0f9d2e
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "3f0d9b6c2a71"
down_revision = "7c1b5a0f9d2e"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("metrics_url", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("workers", "metrics_url")
