"""Tenants keep webhook endpoints; deliveries are paced by receiver and have a log of their attempts.

Revision ID: b7d24f90ae31
Revises: 6f0c3a9e75d1
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "b7d24f90ae31"
down_revision = "6f0c3a9e75d1"
branch_labels = None
depends_on = None

_NOW = sa.text("clock_timestamp()")
_UNSENT = sa.text("status in ('pending', 'sending')")


def _time(name: str, *, is_optional: bool = False) -> sa.Column[object]:
    return sa.Column(
        name, sa.DateTime(timezone=True), nullable=is_optional, server_default=None if is_optional else _NOW
    )


def upgrade() -> None:
    op.add_column("tenants", sa.Column("old_webhook_secret", sa.LargeBinary(), nullable=True))
    op.add_column("tenants", _time("old_webhook_secret_until", is_optional=True))
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("event_types", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column("enabled", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("disabled_reason", sa.Text(), nullable=True),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("old_secret", sa.LargeBinary(), nullable=True),
        _time("old_secret_until", is_optional=True),
        sa.Column("secret_hint", sa.Text(), nullable=False),
        _time("created_at"),
        _time("updated_at"),
    )
    op.create_index("webhook_endpoints_by_tenant", "webhook_endpoints", ["tenant_id", "id"])
    op.create_table(
        "receivers",
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenants.id"), primary_key=True),
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        _time("paused_until", is_optional=True),
        _time("failed_at"),
    )
    _extend_deliveries()
    op.create_table(
        "delivery_attempts",
        sa.Column("delivery_id", sa.Text(), sa.ForeignKey("deliveries.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        _time("started_at"),
        _time("ended_at", is_optional=True),
        sa.Column("response_status", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
    )


def _extend_deliveries() -> None:
    op.add_column("deliveries", sa.Column("endpoint_id", sa.Text(), nullable=True))
    op.add_column("deliveries", sa.Column("receiver", sa.Text(), nullable=True))
    op.add_column("deliveries", sa.Column("event_type", sa.Text(), nullable=True))
    op.add_column("deliveries", sa.Column("is_test", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("deliveries", sa.Column("last_attempt", sa.Integer(), server_default=sa.text("10"), nullable=False))
    op.add_column(
        "deliveries",
        sa.Column(
            "give_up_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp() + interval '4 days'"),
            nullable=False,
        ),
    )
    op.execute(
        r"""
        update deliveries
        set receiver = lower(substring(url from '^[^:]+://[^/?#]+')), event_type = body::jsonb ->> 'type'
        """
    )
    op.execute("update deliveries set receiver = url where receiver is null")
    op.alter_column("deliveries", "receiver", nullable=False)
    op.alter_column("deliveries", "event_type", nullable=False)
    op.drop_index("deliveries_due", "deliveries")
    op.create_index(
        "deliveries_by_receiver", "deliveries", ["tenant_id", "receiver", "next_at", "id"], postgresql_where=_UNSENT
    )
    op.create_index("deliveries_sending", "deliveries", ["next_at"], postgresql_where=sa.text("status = 'sending'"))
    op.create_index("deliveries_pending", "deliveries", ["give_up_at"], postgresql_where=sa.text("status = 'pending'"))
    op.create_index(
        "deliveries_ended", "deliveries", ["created_at"], postgresql_where=sa.text("status in ('delivered', 'dead')")
    )
    op.create_index(
        "deliveries_by_endpoint",
        "deliveries",
        ["endpoint_id", "id"],
        postgresql_where=sa.text("endpoint_id is not null"),
    )


def downgrade() -> None:
    op.drop_table("delivery_attempts")
    for name in ("by_receiver", "sending", "pending", "ended", "by_endpoint"):
        op.drop_index(f"deliveries_{name}", "deliveries")
    op.create_index("deliveries_due", "deliveries", ["next_at"], postgresql_where=_UNSENT)
    for name in ("give_up_at", "last_attempt", "is_test", "event_type", "receiver", "endpoint_id"):
        op.drop_column("deliveries", name)
    op.drop_table("receivers")
    op.drop_table("webhook_endpoints")
    op.drop_column("tenants", "old_webhook_secret_until")
    op.drop_column("tenants", "old_webhook_secret")
