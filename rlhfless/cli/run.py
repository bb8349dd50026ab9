"""`rlhfless run`: one run, on this machine or on an existing Ray cluster."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfless.cli.options import OptionalSpecFile, Overrides
from rlhfless.util.folders import OTHERS, private
from rlhfless.util.text import storable

if TYPE_CHECKING:
    from rlhfless.planning.preflight import Prepared
    from rlhfless.spec import RunSpec

NOTHING_DRAWN = "stopped; nothing was generated yet"


def run(
    spec: OptionalSpecFile = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="RUN", help="Folder of an interrupted run to resume."),
    ] = None,
    allow_changed: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-changed",
            metavar="WHAT",
            help="With --resume: accept changes of data, model, code, or schedule (learning rates).",
        ),
    ] = None,
) -> None:
    """Run a spec: generate, score, learn, and write trace, metrics and checkpoints."""
    from rlhfless.orchestrator.resuming import hold_inputs
    from rlhfless.planning.preflight import preflight
    from rlhfless.spec.imports import folders_in_use
    from rlhfless.spec.load import IMPORTS_FILE, SPEC_FILE, load_spec, resolved_yaml

    allowed = _allowed(allow_changed or (), resume)

    os.umask(OTHERS)
    # Users' own modules are imported from the current folder, and before it from the spec's.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    before = None
    if resume is not None:
        before, loaded, folder = resumed(resume, spec, overrides or (), allowed)
    elif spec is not None:
        loaded = load_spec(spec, overrides or ())
        folder = Path(loaded.output) / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    else:
        raise typer.BadParameter("name a spec, or a run with --resume", param_hint="SPEC")
    _require_unicode(folder)
    prepared = preflight(loaded)
    private(folder)
    changed = hold_inputs(prepared.spec, folder, allowed, before)
    kept = prepared.spec if loaded.placement.size_range is None else loaded  # an elastic run keeps its sizes
    (folder / SPEC_FILE).write_text(resolved_yaml(kept), "utf-8")
    if folders := folders_in_use():
        (folder / IMPORTS_FILE).write_text("\n".join(folders), "utf-8")
    _run(prepared, folder, changed)


def _allowed(kinds: Sequence[str], resume: Path | None) -> frozenset[str]:
    """Return the kinds of changes that --allow-changed names. Raises BadParameter."""
    from rlhfless.orchestrator.resuming import ALLOWABLE
    from rlhfless.spec.explain import nearest

    if kinds and resume is None:
        raise typer.BadParameter("it needs --resume RUN: a new run has changed nothing", param_hint="--allow-changed")
    for kind in kinds:
        if kind not in ALLOWABLE:
            what = f"{kind!r} is not one of {', '.join(ALLOWABLE)}. {nearest(kind, ALLOWABLE)}".rstrip()
            raise typer.BadParameter(what, param_hint="--allow-changed")
    return frozenset(kinds)


def _require_unicode(folder: Path) -> None:
    """Require a run folder in UTF-8, because libraries that write there accept no other path. Raises InputError."""
    from rlhfless.spec.errors import InputError, Problem

    path = str(folder.absolute())
    if storable(path) != path:
        what, hint = f"{path!r} is not valid Unicode", "rename the folder, or choose another for the run"
        raise InputError("the run's folder cannot be used", [Problem("output", what, hint)])


def resumed(
    run_folder: Path, spec: Path | None, overrides: Sequence[str], allowed: Collection[str] = ()
) -> tuple[RunSpec, RunSpec, Path]:
    """Return the run's own spec, the spec to resume it with (its own unless another is given), and its folder.

    `allowed`: the changes that --allow-changed names. Raises InputError if there is nothing to resume, if the spec
    differs in a field that must not change, or if its number of steps would change the learning rates without
    `schedule` being allowed.
    """
    from rlhfless.orchestrator.resuming import SCHEDULE, schedule_problems
    from rlhfless.planning.resolve import keep_resolved
    from rlhfless.records.checkpoints import CHECKPOINTS_FOLDER, checkpoints_of
    from rlhfless.spec.errors import InputError, Problem
    from rlhfless.spec.load import SPEC_FILE, check_resumable, load_spec

    folder = run_folder.absolute()
    if folder.parent.name == CHECKPOINTS_FOLDER:  # users may also name a checkpoint of the run
        folder = folder.parent.parent
    own = folder / SPEC_FILE
    if not own.is_file():
        what = f"{str(run_folder)!r} is no run: it has no {SPEC_FILE}"
        raise InputError(
            "--resume", [Problem("", what, "name a folder that `rlhfless run` made, such as runs/demo-...")]
        )
    before = load_spec(own)
    loaded = keep_resolved(load_spec(spec or own, overrides), before)
    check_resumable(before, loaded, str(spec or "--set"))
    newest = checkpoints_of(folder, loaded.checkpoint).newest()
    if newest is not None and newest.notes.step >= loaded.steps:
        what = f"{loaded.steps}, and the run has done {newest.notes.step}: nothing is left to do"
        raise InputError("--resume", [Problem("steps", what, "go further with, say, `--set steps=...`")])
    problems = schedule_problems(before, loaded, newest.notes.step if newest is not None else 0)
    if problems and SCHEDULE not in allowed:
        raise InputError("--resume", problems)
    return before, loaded, folder


def _run(prepared: Prepared, folder: Path, changed: Sequence[str]) -> None:
    from rlhfless.cli.tables import run_report
    from rlhfless.fleet import private_ray
    from rlhfless.orchestrator.elastic_host import ClusterHost, through_sizes
    from rlhfless.orchestrator.exit_codes import INTERRUPTED, RunStopped, ending_of, hint, user_message
    from rlhfless.orchestrator.launch import remove_stores
    from rlhfless.orchestrator.session import Session
    from rlhfless.telemetry.console import Console
    from rlhfless.telemetry.logs import RunLog
    from rlhfless.telemetry.open_sinks import open_sinks
    from rlhfless.util.signals import Interrupted, OrderlyStop

    run_id, spec = folder.name, prepared.spec
    log = RunLog(folder, run_id)
    console = Console(spec.logging.console, f"run {run_id}", spec.steps)
    host = ClusterHost(console, folder, spec.steps)
    sinks = open_sinks(spec, folder, run_id, console, host)
    resume = f"rlhfless run --resume {shown(folder)}"

    def remove_files() -> None:
        remove_stores(spec, run_id)
        private_ray.remove(folder)

    def say(text: str) -> None:
        logging.getLogger(__name__).info("%s", text)
        console.show(text)

    stop = OrderlyStop(spec.timeouts.stop_s, say, remove_files)
    try:
        for warning in (*prepared.warnings, *changed):
            say(f"warning: {warning}")
        session = Session(prepared, run_id, folder, host, sinks, host)
        outcome = stop.run(through_sizes(session, host, host.is_resized))
    except Interrupted as interrupted:
        console.close()
        last = hint(INTERRUPTED, True, resume, folder, spec) or NOTHING_DRAWN
        logging.getLogger(__name__).info("%s", last)
        with suppress(OSError):  # the terminal may be closed
            typer.echo(last, err=True)
        raise typer.Exit(interrupted.exit_code) from None
    except Exception as error:
        console.close()
        ending = ending_of(error)
        last = hint(ending.advice, ending.resume, resume, folder, spec)
        raise RunStopped("\n".join([user_message(error, folder), last]).rstrip(), ending.exit_code) from error
    finally:
        sinks.close()
        log.close()
    console.show(run_report(f"run {run_id} succeeded", outcome, folder, prepared.skipped))


def shown(path: Path) -> str:
    """Return the shortest form of the path for a shell in the current folder."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
