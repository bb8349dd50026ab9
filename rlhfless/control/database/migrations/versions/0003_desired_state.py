"""Rename a run's requested state."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("runs", schema=None) as batch_op:
        batch_op.alter_column("wish", new_column_name="desired_state")
        batch_op.alter_column("wished_at", new_column_name="desired_at")
