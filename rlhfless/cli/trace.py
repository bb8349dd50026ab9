"""`rlhfless trace`: what a recorded run did and cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands."""
    trace = typer.Typer(help="Look into the trace of a run.", no_args_is_help=True)
    trace.command()(summary)
    app.add_typer(trace, name="trace")


def summary(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or the `trace` in it.")],
) -> None:
    """Print the bill of a run, where its steps' time went, and how long its responses were."""
    from rich.console import Console

    from rlhfless.cli.report import trace_report
    from rlhfless.records.traces import read_trace
    from rlhfless.scaling.accounting import summarise
    from rlhfless.scaling.prices import PriceBook

    inner = folder / "trace"
    trace = read_trace(inner if inner.is_dir() else folder)
    summary = summarise(trace, PriceBook.model_validate(trace.meta.prices))
    Console(highlight=False).print(trace_report(trace.meta.run_id, summary))
