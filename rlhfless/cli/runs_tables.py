"""Runs and their usage, as tables for a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfless.control.objects import FunctionUsage, RunObject, UsageObject
from rlhfless.telemetry.numbers import clock, count, decimal, money
from rlhfless.telemetry.report import FunctionRow, functions_table
from rlhfless.text import legible


def runs_table(runs: Sequence[RunObject]) -> Table:
    """One line per run."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("run", "status", "step", "reward", "cost", "left", ""):
        table.add_column(name, justify="right" if name in ("step", "reward", "cost", "left") else "left", no_wrap=True)
    for run in runs:
        table.add_row(
            run.id,
            str(run.status),
            f"{count(run.step)}/{count(run.steps)}",
            decimal(run.latest.get("reward_mean")),
            money(run.cost_usd),
            clock(run.left_s) if run.left_s is not None else "",
            Text(legible(run.status_reason), style="dim", overflow="ellipsis"),
        )
    return table


def run_lines(run: RunObject) -> RenderableType:
    """One run, in a few lines."""
    head = Text.assemble((run.id, "bold"), f"  {run.status}")
    parts: list[RenderableType] = [head, Text(legible(run.status_reason), style="dim")]
    figures = f"step {count(run.step)} of {count(run.steps)}   reward {decimal(run.latest.get('reward_mean'))}"
    cost = f"   {money(run.cost_usd)} for {decimal(run.device_hours, 2)} device-hours"
    left = f"   {clock(run.left_s)} left" if run.left_s is not None else ""
    parts.append(Text(figures + cost + left))
    if run.latest_checkpoint is not None:
        parts.append(Text(f"checkpoint {run.latest_checkpoint.location}"))
    if run.error is not None:
        parts.append(Text(legible(f"{run.error.code}: {run.error.message}"), style="red"))
    return Group(*parts)


def usage_table(usage: UsageObject) -> RenderableType:
    """By function, and beside the best static fleet."""
    rows = [function_row(row) for row in usage.functions]
    parts: list[RenderableType] = [functions_table(rows, total_row(usage))]
    best = usage.best_static
    if best is not None:
        parts.append(
            Text(
                f"\nthe best static fleet for the same {count(best.steps)} steps (simulated): {best.actors} actor(s), "
                f"{money(best.cost_usd)} in {clock(best.wall_s)}; this run in the same simulation "
                f"{money(best.same_cost_usd)}"
            )
        )
    return Group(*parts)


def function_row(row: FunctionUsage) -> FunctionRow:
    """One function's row."""
    return FunctionRow(
        name=row.function,
        invocations=row.invocations,
        cold_starts=row.cold_starts,
        busy_device_s=row.busy_device_s,
        idle_device_s=row.idle_device_s,
        cold_device_s=row.cold_device_s,
        cost_usd=row.cost_usd,
    )


def total_row(usage: UsageObject) -> FunctionRow:
    """All functions together."""
    rows = usage.functions
    return FunctionRow(
        name="total",
        invocations=sum(row.invocations for row in rows),
        cold_starts=sum(row.cold_starts for row in rows),
        busy_device_s=sum(row.busy_device_s for row in rows),
        idle_device_s=sum(row.idle_device_s for row in rows),
        cold_device_s=sum(row.cold_device_s for row in rows),
        cost_usd=usage.cost_usd,
    )


def time_of(unix_s: float) -> str:
    """In the terminal's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
