"""Migrations of the database to the current tables, with alembic."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

from rlhfless.util.errors import UserError


class NewerDatabase(UserError):
    """The database was written by a newer rlhfless."""


def config_of(engine: Engine | None = None) -> Config:
    """Alembic's configuration; there is no file for it."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    config.attributes["engine"] = engine
    return config


def migrate(engine: Engine) -> None:
    """Migrate to the newest version; an empty database gets all tables. Raises NewerDatabase."""
    known = {script.revision for script in ScriptDirectory.from_config(config_of()).walk_revisions()}
    with engine.connect() as connection:
        stored = MigrationContext.configure(connection).get_current_revision()
    if stored is not None and stored not in known:
        raise NewerDatabase(
            f"the database is of version {stored}, which this rlhfless does not know; use the rlhfless that wrote it, "
            "or a newer one"
        )
    command.upgrade(config_of(engine), "head")
