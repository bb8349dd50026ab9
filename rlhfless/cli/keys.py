"""`rlhfless keys`: the API keys of a service. The commands write its database, so they need no key."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfless.cli.options import Data, Database
from rlhfless.control.settings import DATA_FOLDER, ServiceSettings
from rlhfless.util.folders import OTHERS

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from rlhfless.control.keys import Scope

LEAST_CHARACTERS = 32
"""Fewest characters of a secret: only an unsalted hash is stored, so the secret must be impossible to guess."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    keys = typer.Typer(help="API keys of a service.", no_args_is_help=True)
    keys.command()(create)
    keys.command()(put)
    keys.command("list")(list_keys)
    keys.command()(revoke)
    app.add_typer(keys, name="keys")


def create(
    name: Annotated[str, typer.Argument(help="What it is for, for you to know it by.")],
    scope: Annotated[str, typer.Option(help="read, run (starts and steers runs), or admin.")] = "run",
    data: Data = DATA_FOLDER,
    database: Database = None,
) -> None:
    """Make a key; it is printed this once. A service that runs knows it within seconds."""
    from rlhfless.control.keys import make_key

    chosen = _scope(scope)
    with _session(data, database) as session:
        _, secret = make_key(session, name, chosen)
        session.commit()
    typer.echo(secret)


def put(
    name: Annotated[str, typer.Argument(help="What it is for, for you to know it by.")],
    file: Annotated[Path, typer.Option("--from", metavar="FILE", help="File with the secret, such as a mounted one.")],
    scope: Annotated[str, typer.Option(help="read, run (starts and steers runs), or admin.")] = "run",
    data: Data = DATA_FOLDER,
    database: Database = None,
) -> None:
    """Make a secret that you have already the key of this name; another one of the name is revoked. Idempotent."""
    from rlhfless.control.keys import put_key

    chosen = _scope(scope)
    try:
        secret = file.read_text("utf-8").strip()
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read: {error.strerror}", param_hint="--from") from error
    if len(secret) < LEAST_CHARACTERS:
        what = f"the secret in {file} has {len(secret)} characters, fewer than {LEAST_CHARACTERS}"
        raise typer.BadParameter(f"{what}; `openssl rand -hex 32` makes one", param_hint="--from")
    with _session(data, database) as session:
        key = put_key(session, name, chosen, secret).id
        session.commit()
    typer.echo(key)


def list_keys(
    data: Data = DATA_FOLDER,
    database: Database = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """All keys, without their secrets."""
    from sqlalchemy import select

    from rlhfless.cli.runs_tables import time_of
    from rlhfless.control.database.tables import KeyRow

    with _session(data, database) as session:
        rows = list(session.scalars(select(KeyRow).order_by(KeyRow.created_at)))
    if as_json:
        shown = ("id", "name", "scopes", "created_at", "revoked_at")
        typer.echo(json.dumps([{field: getattr(row, field) for field in shown} for row in rows], indent=2))
        return
    if not rows:
        typer.echo("there are no keys; `rlhfless keys create NAME` makes one")
    for row in rows:
        state = "" if row.revoked_at is None else f"  revoked {time_of(row.revoked_at)}"
        typer.echo(f"{row.id}  {row.scopes[-1]:<5}  {time_of(row.created_at)}  {row.name}{state}")


def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Its id, such as key_0a1b2c3d4e5f, or its name.")],
    data: Data = DATA_FOLDER,
    database: Database = None,
) -> None:
    """Refuse a key from now on. Idempotent."""
    from sqlalchemy import or_, select

    from rlhfless.control.database.tables import KeyRow
    from rlhfless.util.errors import UserError

    with _session(data, database) as session:
        keys = list(session.scalars(select(KeyRow).where(or_(KeyRow.id == key, KeyRow.name == key))))
        if not keys:
            raise UserError(f"there is no key {key!r}; `rlhfless keys list` shows all")
        valid = [row for row in keys if row.revoked_at is None]
        if len(valid) > 1:
            raise UserError(f"several keys are named {key!r}: name one of {', '.join(row.id for row in valid)}")
        for row in valid:
            row.revoked_at = time.time()
        session.commit()
    typer.echo(f"revoked {(valid or keys)[0].id}")


def _scope(text: str) -> Scope:
    from rlhfless.control.keys import SCOPES

    chosen = next((known for known in SCOPES if known == text), None)
    if chosen is None:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(SCOPES)}", param_hint="--scope")
    return chosen


def _session(data: str, database: str | None) -> Session:
    from sqlalchemy.orm import Session

    from rlhfless.control.database.access import database_of, migrate

    os.umask(OTHERS)
    opened = database_of(ServiceSettings(data=data, database=database))
    migrate(opened.engine)
    return Session(opened.engine, expire_on_commit=False)
