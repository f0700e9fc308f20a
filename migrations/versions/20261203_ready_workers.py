"""Workers say whether they take jobs, not how many slots they had at their last beat, which nobody read.

Revision ID: c41e7f2d8b06
Revises: 84d0e5a3b17f
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "c41e7f2d8b06"
down_revision = "84d0e5a3b17f"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_column("workers", "free_slots")
    op.add_column("workers", sa.Column("ready", sa.Boolean(), server_default=sa.text("true"), nullable=False))


def downgrade() -> None:
    op.drop_column("workers", "ready")
    op.add_column("workers", sa.Column("free_slots", sa.Integer(), server_default="0", nullable=False))
