"""Add the sizes of elastic runs, and what their leases say of them."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("runs", schema=None) as batch_op:
        batch_op.add_column(sa.Column("sizes", sa.JSON(), nullable=True))
    with op.batch_alter_table("leases", schema=None) as batch_op:
        batch_op.add_column(sa.Column("sizes", sa.JSON(), server_default="[]", nullable=False))
        batch_op.add_column(sa.Column("seen_s", sa.JSON(), server_default="{}", nullable=False))
        batch_op.add_column(sa.Column("steps_left", sa.Double(), server_default="0", nullable=False))
        batch_op.add_column(sa.Column("change_s", sa.Double(), server_default="0", nullable=False))
        batch_op.add_column(sa.Column("size_reason", sa.Text(), server_default="", nullable=False))
