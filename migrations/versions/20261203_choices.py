"""A job may have several choices, and its tokens logarithms of their probabilities.

Revision ID: e93b05d1c7f4
Revises: c41e7f2d8b06
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "e93b05d1c7f4"
down_revision = "c41e7f2d8b06"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("num_choices", sa.SmallInteger(), server_default=sa.text("1"), nullable=False))
    op.add_column("jobs", sa.Column("has_logprobs", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("events", sa.Column("choice", sa.SmallInteger(), server_default=sa.text("0"), nullable=False))
    op.add_column("events", sa.Column("logprobs", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    op.drop_column("events", "logprobs")
    op.drop_column("events", "choice")
    op.drop_column("jobs", "has_logprobs")
    op.drop_column("jobs", "num_choices")
