"""`rlhfless trace`: the work and cost of a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from rlhfless.cli.options import TraceFolder
from rlhfless.cli.trace_samples import samples

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlhfless.cli.length_scores import ForecastScore

SHOWN_LEVELS = (0.1, 0.5, 0.9, 0.99)
"""Quantiles whose coverage `rlhfless trace lengths` shows."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    trace = typer.Typer(help="Look into the trace of a run.", no_args_is_help=True)
    trace.command()(summary)
    trace.command()(compare)
    trace.command()(lengths)
    trace.command()(samples)
    app.add_typer(trace, name="trace")


def summary(folder: TraceFolder) -> None:
    """Print the bill of a run, how the time of its steps was spent, and how long its responses were."""

    from rlhfless.cli.report import trace_report
    from rlhfless.records.traces import read_trace, trace_folder
    from rlhfless.scaling.accounting import summarise
    from rlhfless.scaling.prices import PriceBook
    from rlhfless.telemetry.terminal import Terminal

    trace = read_trace(trace_folder(folder))
    summary = summarise(trace, PriceBook.model_validate(trace.meta.prices))
    Terminal().print(trace_report(trace.meta.run_id, summary))


def compare(first: TraceFolder, second: TraceFolder) -> None:
    """Print which share of the samples of two runs has the same tokens, such as a resumed run and an unbroken one."""
    from rlhfless.records.traces import compare_samples, read_trace, trace_folder

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

    from rlhfless.cli.length_scores import score_forecasts
    from rlhfless.records.traces import read_trace, trace_folder
    from rlhfless.telemetry.terminal import Terminal

    trace = read_trace(trace_folder(folder))
    Terminal().print(_lengths_report(trace.meta.run_id, score_forecasts(trace)))


def _lengths_report(run_id: str, scores: Sequence[ForecastScore]) -> RenderableType:
    """A table with a row for each forecaster."""
    from rich.console import Group
    from rich.text import Text

    from rlhfless.cli.tables import table
    from rlhfless.scaling.lengths import QUANTILE_LEVELS
    from rlhfless.telemetry.numbers import count, decimal

    levels = [f"p{100 * level:g}" for level in SHOWN_LEVELS]
    made = table("response lengths", "samples", "rank corr", "pinball", *levels)
    at = [QUANTILE_LEVELS.tolist().index(level) for level in SHOWN_LEVELS]
    for score in scores:
        covered = [None] * len(at) if score.coverage is None else score.coverage[at].tolist()
        shares = [decimal(share) for share in covered]
        row = (count(score.samples), decimal(score.rank_correlation), decimal(score.pinball_tokens, 1))
        made.add_row(score.name, *row, *shares)
    legend = (
        "rank corr: Spearman within a step. pinball: mean loss over all quantiles, in tokens; lower is better. "
        "p90: share of lengths at or below the 90 % quantile; 0.9 is right. Half time: the rest of a step, "
        "when half of its samples have finished."
    )
    return Group(Text(run_id, style="bold"), "", made, "", Text(legend, style="dim"))
