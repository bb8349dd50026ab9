"""`rlhfless up`, `down`, `migrate` and `keys`: the service of a data folder."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from rlhfless.cli.options import Data, Database
from rlhfless.control.settings import (
    DATA_FOLDER,
    ServiceSettings,
    address_of,
    default_roots,
    open_data,
)
from rlhfless.spec.base import MOST_SIZES
from rlhfless.spec.errors import InputError
from rlhfless.spec.explain import explain
from rlhfless.util.folders import OTHERS

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from rlhfless.control.keys import Scope


UP_S = 120.0
"""Maximum wait for a service in the background to answer. Its database may be on another machine."""

LOG_FILE = "service.log"


keys = typer.Typer(help="Create, list and revoke the API keys of a service.", no_args_is_help=True)


def up(
    data: Data = DATA_FOLDER,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Addresses other than loopback require an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8080,
    database: Database = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Ray cluster: HOST:PORT of a cluster that this machine belongs to, or http://HEAD:8265 of a remote "
            "one. Starts a private cluster by default.",
        ),
    ] = None,
    ray_cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="In Kubernetes: RayCluster whose pending pods waiting runs report."),
    ] = None,
    watch_nodes: Annotated[
        bool, typer.Option("--watch-nodes", help="With --ray-cluster: also drain cordoned or tainted nodes.")
    ] = False,
    capacity: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND=N", help="Most devices of runs, such as h100=64, if an autoscaler adds nodes."),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=N[:WEIGHT]",
            help="Most devices of the runs of an API key, such as team-a=16:2, and its share of them; 0 for no limit.",
        ),
    ] = None,
    max_drivers: Annotated[int, typer.Option(min=1, help="Maximum number of runs at a time; others are queued.")] = 4,
    driver_memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=0.5, help="Memory of a driver. Default: a quarter of the machine's."),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=N", help="Upper limit on a key of `sizes`, such as step_samples=4096."),
    ] = None,
    root: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Folder or URL below which specs may name files. Default: the current one."),
    ] = None,
    code: Annotated[
        list[str] | None, typer.Option(metavar="PACKAGE", help="Package whose code specs may name.")
    ] = None,
    retention_days: Annotated[
        float | None, typer.Option(min=0.01, help="Delete finished runs and their folders after this many days.")
    ] = None,
    public_url: Annotated[
        str | None, typer.Option(metavar="URL", help="URL at which clients reach the service.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the service answers, and keep it running in the background.")
    ] = False,
) -> None:
    """Start the service: API and page at http://127.0.0.1:8080. Ctrl-C stops it; its runs resume at the next `up`."""
    values: dict[str, Any] = {
        "data": data,
        "host": host,
        "port": port,
        "database": database,
        "ray_address": ray_address,
        "ray_cluster": ray_cluster,
        "watch_nodes": watch_nodes,
        "quotas": dict(_quota(text) for text in quota or ()),
        "capacity": dict(_counted(text, "--capacity", "h100=64") for text in capacity or ()),
        "max_drivers": max_drivers,
        "driver_memory_gib": driver_memory,
        "sizes": MOST_SIZES.model_dump() | dict(_counted(text, "--size", "step_samples=4096") for text in size or ()),
        "roots": tuple(str(Path(path).absolute()) if "://" not in path else path for path in root or default_roots()),
        "code": tuple(code or ()),
        "public_url": public_url,
        "retention": {"days": retention_days},
    }
    try:
        settings = ServiceSettings.model_validate(values)
    except ValidationError as error:
        raise InputError("the service cannot start", explain(error, ServiceSettings, {}, values)) from error
    os.umask(OTHERS)
    # By default each process that imports torch's compiler makes a cache below /tmp, and leaves it there.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(settings.folder / "inductor"))
    _require_code(settings)
    if detach:
        _detached(settings)
        return
    from rlhfless.control.process_limits import raise_priority

    raise_priority()  # the imports below take a second, and much longer while a run uses the cores
    from rlhfless.control.serve import serve

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("rlhfless").setLevel(logging.INFO)
    asyncio.run(serve(settings, _say))


def _say(text: str) -> None:
    with suppress(OSError):  # the service goes on when its terminal is closed
        typer.echo(text, err=True)


def _counted(text: str, option: str, example: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name or not count.isdecimal():
        raise typer.BadParameter(f"{text!r} is not of the form NAME=N, such as {example}", param_hint=option)
    return name, int(count)


def _quota(text: str) -> tuple[str, dict[str, float]]:
    """Return the API key and the quota of `team-a=16:2`."""
    counted, colon, weight = text.partition(":")
    name, count = _counted(counted, "--quota", "team-a=16:2")
    try:
        share = float(weight) if colon else 1.0
    except ValueError:
        raise typer.BadParameter(f"{text!r}: the weight {weight!r} is no number", param_hint="--quota") from None
    return name, ({"max_devices": count} if count else {}) | {"weight": share}


def _require_code(settings: ServiceSettings) -> None:
    """Refuse a package of --code that does not exist, because every run that names it would fail. Drivers in a Ray
    cluster elsewhere have their own packages, so for them only the form of the names is checked."""
    from rlhfless.spec.imports import is_importable

    for name in settings.code:
        what = ""
        if not all(part.isidentifier() for part in name.split(".")):
            what = f"{name!r} is not the name of a package, such as `mine` for mine.rewards:score"
        elif not settings.elsewhere and not is_importable(name):
            what = (
                f"there is no package {name!r}, installed or in {os.getcwd()}; "
                "start from its folder, or add that to PYTHONPATH"
            )
        if what:
            raise typer.BadParameter(what, param_hint="--code")


def _detached(settings: ServiceSettings) -> None:
    """Run the same command in the background, in its own session, and return once its service answers."""
    from rlhfless.util.errors import UserError

    open_data(settings)
    if (url := address_of(settings)) is not None and _answers(url):
        typer.echo(f"rlhfless is at {url} already (data: {settings.folder})", err=True)
        return
    command = [sys.executable, sys.argv[0], *(word for word in sys.argv[1:] if word != "--detach")]
    log = settings.folder / LOG_FILE
    with log.open("ab") as stream:
        began = stream.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True, env=os.environ
        )
    end_s = time.monotonic() + UP_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            with log.open("rb") as stream:
                stream.seek(began)
                raise UserError(stream.read().decode("utf-8", "replace").strip() or f"the service has ended; see {log}")
        url = address_of(settings)
        if url is not None and _answers(url):
            typer.echo(f"rlhfless is at {url} (data: {settings.folder}, log: {log})", err=True)
            return
        time.sleep(0.1)
    raise UserError(f"waited {UP_S:.0f} s for the service to answer; see {log}")


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/healthz", timeout=2.0).is_success
    except httpx.HTTPError:
        return False


def down(data: Data = DATA_FOLDER) -> None:
    """Stop the service of a data folder and its runs. They resume at the next `up`."""
    from rlhfless.control.serve import stop_service

    os.umask(OTHERS)
    stopped = stop_service(ServiceSettings(data=data))
    typer.echo("stopped" if stopped else f"no service runs for {Path(data).absolute()}", err=True)


def migrate(data: Data = DATA_FOLDER, database: Database = None) -> None:
    """Update the schema of the service's database, as `rlhfless up` does at its start. Idempotent."""
    from rlhfless.control.database.access import database_of
    from rlhfless.control.database.access import migrate as bring_up_to_date

    os.umask(OTHERS)
    opened = database_of(ServiceSettings(data=data, database=database))
    bring_up_to_date(opened.engine)
    typer.echo(f"the tables of {opened.engine.url.render_as_string(hide_password=True)} are up to date", err=True)


LEAST_CHARACTERS = 32
"""Minimum length of a secret: only an unsalted hash is stored, so the secret must be impossible to guess."""


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the key, such as the person or system that uses it.")],
    scope: Annotated[
        str, typer.Option(help="What the key allows: read, run (start and control runs), or admin.")
    ] = "run",
    data: Data = DATA_FOLDER,
    database: Database = None,
) -> None:
    """Create a key and print it once. A running service accepts it within seconds."""
    from rlhfless.control.keys import make_key

    chosen = _scope(scope)
    with _session(data, database) as session:
        _, secret = make_key(session, name, chosen)
        session.commit()
    typer.echo(secret)


@keys.command()
def put(
    name: Annotated[str, typer.Argument(help="Name of the key, such as the person or system that uses it.")],
    file: Annotated[Path, typer.Option("--from", metavar="FILE", help="File with the secret, such as a mounted one.")],
    scope: Annotated[
        str, typer.Option(help="What the key allows: read, run (start and control runs), or admin.")
    ] = "run",
    data: Data = DATA_FOLDER,
    database: Database = None,
) -> None:
    """Store an existing secret under this name, and revoke the name's earlier key. Idempotent."""
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


@keys.command("list")
def list_keys(
    data: Data = DATA_FOLDER,
    database: Database = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List all keys, without their secrets."""
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
        typer.echo("no keys yet; `rlhfless keys create NAME` creates one")
    for row in rows:
        state = "" if row.revoked_at is None else f"  revoked {time_of(row.revoked_at)}"
        typer.echo(f"{row.id}  {row.scopes[-1]:<5}  {time_of(row.created_at)}  {row.name}{state}")


@keys.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Id of the key, such as key_0a1b2c3d4e5f, or its name.")],
    data: Data = DATA_FOLDER,
    database: Database = None,
) -> None:
    """Revoke a key. Idempotent."""
    from sqlalchemy import or_, select

    from rlhfless.control.database.tables import KeyRow
    from rlhfless.util.errors import UserError

    with _session(data, database) as session:
        found = list(session.scalars(select(KeyRow).where(or_(KeyRow.id == key, KeyRow.name == key))))
        if not found:
            raise UserError(f"there is no key {key!r}; `rlhfless keys list` shows all")
        valid = [row for row in found if row.revoked_at is None]
        if len(valid) > 1:
            raise UserError(f"several keys are named {key!r}: name one of {', '.join(row.id for row in valid)}")
        for row in valid:
            row.revoked_at = time.time()
        session.commit()
    typer.echo(f"revoked {(valid or found)[0].id}")


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
