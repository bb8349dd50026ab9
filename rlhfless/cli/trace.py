"""`rlhfless trace`: the work and cost of a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands."""
    trace = typer.Typer(help="Look into the trace of a run.", no_args_is_help=True)
    trace.command()(summary)
    trace.command()(compare)
    trace.command()(lengths)
    app.add_typer(trace, name="trace")


TraceFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or the `trace` in it.")]


def summary(folder: TraceFolder) -> None:
    """Print the bill of a run, how the time of its steps was spent, and how long its responses were."""
    from rich.console import Console

    from rlhfless.cli.report import trace_report
    from rlhfless.records.traces import read_trace, trace_folder
    from rlhfless.scaling.accounting import summarise
    from rlhfless.scaling.prices import PriceBook

    trace = read_trace(trace_folder(folder))
    summary = summarise(trace, PriceBook.model_validate(trace.meta.prices))
    Console(highlight=False).print(trace_report(trace.meta.run_id, summary))


def compare(first: TraceFolder, second: TraceFolder) -> None:
    """Print which share of the samples of two runs has the same tokens, such as a resumed run and an unbroken one."""
    from rlhfless.records.compare import compare_samples
    from rlhfless.records.traces import read_trace, trace_folder

    result = compare_samples(read_trace(trace_folder(first)), read_trace(trace_folder(second)))
    typer.echo(f"{result.identical:,} of {result.compared:,} samples are token-identical ({result.fraction:.4f})")
    if result.first_difference is not None:
        step, prompt_id, index = result.first_difference
        typer.echo(f"the first that differs: step {step}, prompt {prompt_id}, sample {index}")
    if result.only_in_first or result.only_in_second:
        typer.echo(f"only in the first: {result.only_in_first:,}; only in the second: {result.only_in_second:,}")


def lengths(folder: TraceFolder) -> None:
    """Print how well response lengths could be forecast: each step from the steps before it, compared with two simple
    forecasts."""
    from rich.console import Console

    from rlhfless.cli.lengths import lengths_report
    from rlhfless.records.traces import read_trace, trace_folder
    from rlhfless.scaling.lengths.evaluate import evaluate

    trace = read_trace(trace_folder(folder))
    Console(highlight=False).print(lengths_report(trace.meta.run_id, evaluate(trace)))
