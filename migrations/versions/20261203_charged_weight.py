"""A charge remembers the weight by which it was divided: the tenant's may change before it is corrected.

Revision ID: 84d0e5a3b17f
Revises: c2f96b1e7a04
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "84d0e5a3b17f"
down_revision = "c2f96b1e7a04"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("charged_weight", sa.Float(), nullable=True))
    op.add_column("settlements", sa.Column("charged_weight", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("settlements", "charged_weight")
    op.drop_column("jobs", "charged_weight")
