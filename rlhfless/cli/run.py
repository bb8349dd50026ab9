"""`rlhfless run`: one run, on this machine or on a Ray cluster that is there."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlhfless.cli.options import Overrides, SpecFile

if TYPE_CHECKING:
    from rlhfless.loop.driver import Outcome
    from rlhfless.loop.preflight import Prepared
    from rlhfless.spec import RunSpec

INTERRUPTED = 130
"""Exit code of a program ended by Ctrl-C: 128 + SIGINT."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(run)


def run(spec: SpecFile, overrides: Overrides = None) -> None:
    """Run a spec: generate, score, learn, and write the trace, the metrics and a checkpoint."""
    from rlhfless.loop.preflight import preflight
    from rlhfless.spec.load import load_spec, resolved_yaml

    # The user's own rewards lie where the command is called.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    loaded = load_spec(spec, overrides or ())
    prepared = preflight(loaded)
    run_id = f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder = Path(loaded.output) / run_id
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(resolved_yaml(loaded))
    _run(loaded, prepared, run_id, folder)


def _run(spec: RunSpec, prepared: Prepared, run_id: str, folder: Path) -> None:
    from rlhfless.cli.report import final_report
    from rlhfless.loop.driver import Driver
    from rlhfless.telemetry.console import Console
    from rlhfless.telemetry.logs import RunLog
    from rlhfless.telemetry.report import render_report
    from rlhfless.telemetry.sinks import open_sinks

    log = RunLog(folder, run_id)
    console = Console(spec.logging.console, f"run {run_id}", spec.steps)
    sinks = open_sinks(spec.logging, folder, run_id, console)
    try:
        for warning in prepared.warnings:
            console.show(f"warning: {warning}")
        outcome: Outcome = asyncio.run(Driver(spec, prepared, run_id, folder, console, sinks).execute())
    except KeyboardInterrupt:
        console.close()
        typer.echo(f"interrupted; the trace so far is in {folder / 'trace'}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        sinks.close()
        log.close()
    console.show(render_report(final_report(f"run {run_id} succeeded", outcome, folder)))
