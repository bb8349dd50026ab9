"""Reports from the trace of a run: at its end, and of `rlhfless trace`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfless.cli.tables import final_report, functions_table, table
from rlhfless.orchestrator.driver import Outcome
from rlhfless.prepare.faults import SkippedRows
from rlhfless.records.ledger import TRACE_FOLDER
from rlhfless.records.traces import read_trace
from rlhfless.scaling.accounting import Phase, Summary, summarise
from rlhfless.scaling.prices import PriceBook, by_kind, mean_phases
from rlhfless.telemetry.numbers import count, decimal, money
from rlhfless.telemetry.terminal import whole


def run_report(title: str, outcome: Outcome, folder: Path, skipped: Sequence[SkippedRows]) -> RenderableType:
    """A run's results, device time and cost, read back from its own trace as any other reader would; and the rows that
    it did without."""
    trace = read_trace(folder / TRACE_FOLDER)
    summary = summarise(trace, PriceBook.model_validate(trace.meta.prices))
    report = final_report(
        title,
        outcome.steps,
        outcome.wall_s,
        [(usage.name, usage) for usage in summary.functions],
        outcome.before,
        outcome.after,
        {
            "checkpoint": outcome.checkpoint,
            "best checkpoint": outcome.best_checkpoint,
            "best by": outcome.best_by,
            "trace": folder / TRACE_FOLDER,
            "metrics": folder / "metrics.jsonl",
            "log": folder / "run.log",
        },
        outcome.recovered.replicas_lost,
        outcome.recovered.steps_again,
        outcome.attempts,
    )
    return Group(report, *(whole(str(each)) for each in skipped))


def trace_report(run_id: str, summary: Summary) -> RenderableType:
    """The bill of a run, and how the time of its steps was spent."""
    title = Text.assemble((run_id, "bold"), f"  {len(summary.steps)} steps for {money(summary.cost_usd)}")
    parts: list[RenderableType] = [title, "", functions_table([(usage.name, usage) for usage in summary.functions])]
    if summary.steps:
        parts += ["", _phases(summary)]
    if summary.response_tokens:
        lengths = "   ".join(f"p{100 * q:g} {count(v)}" for q, v in summary.response_tokens.items())
        parts += ["", f"response tokens  {lengths}"]
    if (prompts := summary.prompts) is not None:
        evicted = f"; {prompts.evicted_tokens:,} evicted and computed again" if prompts.evicted_tokens else ""
        once = f"computed once: {prompts.once:.0%}; saved {prompts.saved:.0%} of the step"
        parts += ["", f"prompt tokens    {once}{evicted}"]
    if summary.engine_starts:
        phases = mean_phases(summary.engine_starts)
        by_phase = ", ".join(f"{phase.replace('_', ' ')} {seconds:.1f}" for phase, seconds in phases.items())
        parts += ["", f"engine starts    {len(summary.engine_starts)} x {sum(phases.values()):.1f} s: {by_phase}"]
    if summary.acquired:
        parts += ["", *(_waits(kind, *lags_s) for kind, lags_s in by_kind(summary.acquired).items())]
    return Group(*parts)


def _waits(kind: str, present_s: Sequence[float], added_s: Sequence[float]) -> str:
    """The waits for devices of a kind: median and longest, in seconds."""
    waits = [
        f"{len(lags_s)} x {median(lags_s):.1f} s (longest {max(lags_s):.1f}) {where}"
        for lags_s, where in ((present_s, "on nodes that were there"), (added_s, "on nodes that came"))
        if lags_s
    ]
    return f"waits for {kind}  {'; '.join(waits)}"


def _phases(summary: Summary) -> Table:
    """Seconds per step by phase, median and longest. Phases overlap, so they need not add up to the wall time; the
    recovery from faults is in none of them."""
    made = table("seconds per step", "median", "longest")
    rows = {str(phase): [times.phases_s[phase] for times in summary.steps] for phase in Phase}
    rows["overhead"] = [times.overhead_s for times in summary.steps]
    rows["recovery"] = [times.recovery_s for times in summary.steps]
    rows["wall"] = [times.wall_s for times in summary.steps]
    for name, seconds in rows.items():
        if any(seconds):
            made.add_row(name, decimal(median(seconds)), decimal(max(seconds)))
    return made
