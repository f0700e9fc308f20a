"""Tenants have quotas and rates; jobs reserve what they may use.

Revision ID: 5d7a2c90e318
Revises: 9b8e52d47c10
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "5d7a2c90e318"
down_revision = "9b8e52d47c10"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("tokens_per_day", sa.BigInteger(), nullable=True))
    op.add_column("tenants", sa.Column("requests_per_minute", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("reserved_tokens", sa.Integer(), server_default="0", nullable=False))
    op.add_column("settlements", sa.Column("reserved_tokens", sa.Integer(), server_default="0", nullable=False))
    op.create_table(
        "quota_days",
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenants.id"), primary_key=True),
        sa.Column("day", sa.Date(), primary_key=True),
        sa.Column("reserved", sa.BigInteger(), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("quota_days")
    op.drop_column("settlements", "reserved_tokens")
    op.drop_column("jobs", "reserved_tokens")
    op.drop_column("tenants", "requests_per_minute")
    op.drop_column("tenants", "tokens_per_day")
