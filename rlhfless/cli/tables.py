"""Tables of several commands: device time of functions, a run's final report, and the report of its trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfless.telemetry.terminal import clock, count, decimal, money, whole

if TYPE_CHECKING:
    from rlhfless.control.objects import FunctionUsage
    from rlhfless.orchestrator.driver import Outcome
    from rlhfless.prepare.faults import SkippedRows
    from rlhfless.scaling.accounting import Summary, Usage
    from rlhfless.scaling.episode_waits import EpisodeWaits

    Used = Usage | FunctionUsage


def table(first: str, *others: str, texts: int = 1, padding: int = 2) -> Table:
    """Create a table without lines. The first `texts` columns are texts, the others numbers."""
    made = Table(box=None, padding=(0, padding, 0, 0), header_style="dim")
    for place, title in enumerate((first, *others)):
        made.add_column(title, justify="left" if place < texts else "right", no_wrap=place == 0)
    return made


def functions_table(usages: Sequence[tuple[str, Used]]) -> Table:
    """Render device-seconds and cost of each function, and the total."""
    made = table("device-seconds", "busy", "idle", "cold", "held", "busy %", "calls", "starts", "cost")
    for name, usage in usages:
        _add(made, name, [usage])
    _add(made, "total", [usage for _, usage in usages], style="bold")
    return made


def _add(made: Table, name: str, usages: Sequence[Used], style: str = "") -> None:
    """Add a row for all of these usages together."""
    busy_s = sum(usage.busy_device_s for usage in usages)
    idle_s = sum(usage.idle_device_s for usage in usages)
    cold_s = sum(usage.cold_device_s for usage in usages)
    held_s = busy_s + idle_s + cold_s
    made.add_row(
        name,
        *(decimal(seconds, 1) for seconds in (busy_s, idle_s, cold_s, held_s)),
        decimal(100 * busy_s / held_s if held_s else None, 0),
        count(sum(usage.invocations for usage in usages)),
        count(sum(usage.cold_starts for usage in usages)),
        money(sum(usage.cost_usd for usage in usages)),
        style=style,
    )


def final_report(
    title: str,
    steps: int,
    wall_s: float,
    usages: Sequence[tuple[str, Used]],
    before: Mapping[str, float],
    after: Mapping[str, float | None],
    files: Mapping[str, Path | str],
    replicas_lost: int = 0,
    steps_again: int = 0,
    attempts: int = 1,
) -> RenderableType:
    """Render the report at the end of a run: evaluations, device time, cost and files.

    `title`: such as `run demo-7f3a succeeded`; `before`, `after`: evaluations on held-out prompts; `replicas_lost`,
    `steps_again`: number of lost replicas, and of steps repeated after a fault. Time and cost are of all `attempts`.
    """
    cost = money(sum(usage.cost_usd for _, usage in usages))
    made = f", in {attempts} attempts" if attempts > 1 else ""
    heading = Text.assemble((title, "bold"), f"  {count(steps)} steps in {clock(wall_s)} for {cost}{made}")
    parts: list[RenderableType] = ["", heading, ""]
    recovered = [f"{count(replicas_lost)} replica{'s' * (replicas_lost != 1)} lost"] if replicas_lost else []
    recovered += [f"{count(steps_again)} step{'s' * (steps_again != 1)} done again"] if steps_again else []
    parts += [f"recovered: {', '.join(recovered)}", ""] if recovered else []
    parts += [_evaluations(before, after), ""] if after else []
    column = max(map(len, files), default=0)
    listed = [whole(f"{name:<{column}}  {path}") for name, path in files.items()]
    return Group(*parts, functions_table(usages), "", *listed)


def _evaluations(before: Mapping[str, float], after: Mapping[str, float | None]) -> Table:
    made = table("held-out prompts", "before", "after", "change")
    for name, value in after.items():
        first = before.get(name)
        change = None if first is None or value is None else value - first
        sign = "+" if change is not None and change >= 0 else ""
        made.add_row(name.replace("_", " "), decimal(first), decimal(value), sign + decimal(change))
    return made


def run_report(title: str, outcome: Outcome, folder: Path, skipped: Sequence[SkippedRows]) -> RenderableType:
    """Render a run's results, device time and cost, read back from its trace, and the rows that were skipped."""
    from rlhfless.records.ledger import TRACE_FOLDER
    from rlhfless.records.traces import read_trace
    from rlhfless.scaling.accounting import summarise
    from rlhfless.scaling.prices import PriceBook

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


def trace_report(run_id: str, summary: Summary, waits: EpisodeWaits | None = None) -> RenderableType:
    """Render the cost of a run, and how its steps spent their time."""
    from rlhfless.scaling.prices import by_kind, mean_phases

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
    if waits is not None:
        actors = f"actors waited {waits.actors_device_s:,.0f} device-s ({money(waits.actors_usd)})"
        again = f"{waits.recomputed_tokens:,} tokens computed again after waits"
        held = f"held {waits.environment_s:,.0f} s ({money(waits.environment_usd)})"
        parts += ["", f"environment      episodes waited {waits.episodes_s:,.0f} s; {actors}; {again}; {held}"]
    costs = {usage.name: usage.cost_usd for usage in summary.functions}
    for function, usd in summary.pools_usd.items():
        parts += ["", f"{function} cost {money(costs[function])}; devices of its own for the whole run: {money(usd)}"]
    if summary.engine_starts:
        phases = mean_phases(summary.engine_starts)
        by_phase = ", ".join(f"{phase.replace('_', ' ')} {seconds:.1f}" for phase, seconds in phases.items())
        parts += ["", f"engine starts    {len(summary.engine_starts)} x {sum(phases.values()):.1f} s: {by_phase}"]
    if summary.acquired:
        parts += ["", *(_waits(kind, *lags_s) for kind, lags_s in by_kind(summary.acquired).items())]
    return Group(*parts)


def _waits(kind: str, present_s: Sequence[float], added_s: Sequence[float]) -> str:
    """Format the waits for devices of a kind: median and longest, in seconds."""
    waits = [
        f"{len(lags_s)} x {median(lags_s):.1f} s (longest {max(lags_s):.1f}) {where}"
        for lags_s, where in ((present_s, "on nodes that were there"), (added_s, "on nodes that came"))
        if lags_s
    ]
    return f"waits for {kind}  {'; '.join(waits)}"


def _phases(summary: Summary) -> Table:
    """Render seconds per step by phase, median and longest.

    Phases overlap, so they need not add up to the wall time. No phase includes the recovery from faults.
    """
    from rlhfless.scaling.accounting import Phase

    made = table("seconds per step", "median", "longest")
    rows = {str(phase): [times.phases_s[phase] for times in summary.steps] for phase in Phase}
    rows["overhead"] = [times.overhead_s for times in summary.steps]
    rows["recovery"] = [times.recovery_s for times in summary.steps]
    rows["wall"] = [times.wall_s for times in summary.steps]
    for name, seconds in rows.items():
        if any(seconds):
            made.add_row(name, decimal(median(seconds)), decimal(max(seconds)))
    return made
