"""`rlhfless up` and `rlhfless down`: the service, with its API and page."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

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
from rlhfless.spec.errors import InputError
from rlhfless.spec.explain import explain
from rlhfless.spec.sizes import MOST_SIZES
from rlhfless.util.folders import OTHERS

UP_S = 120.0
"""Longest wait for a service in the background to answer: it opens its database, which another machine may have."""

LOG_FILE = "service.log"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(up)
    app.command()(down)
    app.command()(migrate)


def up(
    data: Data = DATA_FOLDER,
    host: Annotated[str, typer.Option(help="Address to listen on. Off loopback an API key is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8080,
    database: Database = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Ray cluster: HOST:PORT of one that this machine is a node of, or http://HEAD:8265 of one elsewhere. "
            "By default a private one is started.",
        ),
    ] = None,
    ray_cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="In Kubernetes: the RayCluster, of whose pending pods reasons are told."),
    ] = None,
    watch_nodes: Annotated[
        bool, typer.Option("--watch-nodes", help="With --ray-cluster: also leave nodes that are cordoned or tainted.")
    ] = False,
    capacity: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND=N", help="Devices for runs, where nodes come when they are needed."),
    ] = None,
    max_drivers: Annotated[int, typer.Option(min=1, help="Runs with a driver at a time; others are queued.")] = 4,
    driver_memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=0.5, help="Memory of a driver; by default a quarter of what there is."),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=N", help="The largest runs that specs may ask for, by the keys of `sizes`."),
    ] = None,
    root: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Folder that specs may name files in; by default the current one."),
    ] = None,
    code: Annotated[
        list[str] | None, typer.Option(metavar="PACKAGE", help="Specs may name code of this package.")
    ] = None,
    retention_days: Annotated[
        float | None, typer.Option(min=0.01, help="Remove ended runs, with their folders, after so many days.")
    ] = None,
    public_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Under which clients reach the service.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it answers; it goes on in the background.")
    ] = False,
) -> None:
    """Start the service: API and page at http://127.0.0.1:8080. Ctrl-C stops runs in order; they go on at the next
    `up`."""
    values: dict[str, Any] = {
        "data": data,
        "host": host,
        "port": port,
        "database": database,
        "ray_address": ray_address,
        "ray_cluster": ray_cluster,
        "watch_nodes": watch_nodes,
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
    from rlhfless.control.thread_priority import raise_priority

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
    """Run the same command in the background, in a session of its own, until its service answers."""
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
    """Stop the service of a data folder with its runs, in order. They go on at the next `up`."""
    from rlhfless.control.serve import stop_service

    os.umask(OTHERS)
    stopped = stop_service(ServiceSettings(data=data))
    typer.echo("stopped" if stopped else f"no service runs for {Path(data).absolute()}", err=True)


def migrate(data: Data = DATA_FOLDER, database: Database = None) -> None:
    """Bring the tables of a service's database up to date, as `rlhfless up` does first. Idempotent."""
    from rlhfless.control.database.access import database_of
    from rlhfless.control.database.access import migrate as bring_up_to_date

    os.umask(OTHERS)
    opened = database_of(ServiceSettings(data=data, database=database))
    bring_up_to_date(opened.engine)
    typer.echo(f"the tables of {opened.engine.url.render_as_string(hide_password=True)} are up to date", err=True)
