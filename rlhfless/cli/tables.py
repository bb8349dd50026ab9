"""Tables of several commands: the device time of functions, and the report at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfless.telemetry.numbers import clock, count, decimal, money
from rlhfless.telemetry.terminal import whole

if TYPE_CHECKING:
    from rlhfless.control.objects import FunctionUsage
    from rlhfless.scaling.accounting import Usage

    Used = Usage | FunctionUsage


def table(first: str, *others: str, texts: int = 1, padding: int = 2) -> Table:
    """A table without lines. The first `texts` columns are texts, the others numbers."""
    made = Table(box=None, padding=(0, padding, 0, 0), header_style="dim")
    for place, title in enumerate((first, *others)):
        made.add_column(title, justify="left" if place < texts else "right", no_wrap=place == 0)
    return made


def functions_table(usages: Sequence[tuple[str, Used]]) -> Table:
    """Device-seconds and cost of each function, and of all."""
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
    """The report at the end of a run: did it learn, what did it cost and for what, where are the files.

    `title`: such as `run demo-7f3a succeeded`; `before`, `after`: evaluations on held-out prompts; `replicas_lost`,
    `steps_again`: replicas that were lost, and steps that were done again after a fault. Time and cost are of all
    `attempts`.
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
