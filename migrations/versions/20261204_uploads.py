"""Files may expire, and come in parts.

Revision ID: 2b6f81d40c9e
Revises: e93b05d1c7f4
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "2b6f81d40c9e"
down_revision = "e93b05d1c7f4"
branch_labels = None
depends_on = None

_MOMENT = sa.DateTime(timezone=True)
_NOW = sa.text("clock_timestamp()")


def upgrade() -> None:
    op.add_column("files", sa.Column("expires_at", _MOMENT, nullable=True))
    op.add_column("batches", sa.Column("output_expires_after_s", sa.Integer(), nullable=True))
    op.create_table(
        "uploads",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("expires_after_s", sa.Integer(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("file_id", sa.Text(), nullable=True),
        sa.Column("created_at", _MOMENT, server_default=_NOW, nullable=False),
        sa.Column("expires_at", _MOMENT, nullable=False),
    )
    op.create_index("uploads_by_tenant", "uploads", ["tenant_id", "id"])
    op.create_table(
        "upload_parts",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("upload_id", sa.Text(), sa.ForeignKey("uploads.id", ondelete="CASCADE"), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", _MOMENT, server_default=_NOW, nullable=False),
    )
    op.create_index("upload_parts_by_upload", "upload_parts", ["upload_id"])


def downgrade() -> None:
    op.drop_table("upload_parts")
    op.drop_table("uploads")
    op.drop_column("batches", "output_expires_after_s")
    op.drop_column("files", "expires_at")
