"""The report at the end of a run: did it learn, what did it cost and for what, where are the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfless.telemetry.numbers import clock, count, decimal, money


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One figure of the evaluation on held-out prompts, before and after the run."""

    name: str
    """Such as `exact match, greedy`."""
    before: float | None
    after: float | None


class Used(Protocol):
    """Figures of a function, wherever they come from."""

    @property
    def invocations(self) -> int: ...
    @property
    def cold_starts(self) -> int: ...
    @property
    def busy_device_s(self) -> float: ...
    @property
    def idle_device_s(self) -> float: ...
    @property
    def cold_device_s(self) -> float: ...
    @property
    def cost_usd(self) -> float: ...


@dataclass(frozen=True, slots=True)
class FunctionRow:
    """The device time and work of one function. See rlhfless.scaling.accounting.Usage."""

    name: str
    invocations: int
    cold_starts: int
    busy_device_s: float
    idle_device_s: float
    cold_device_s: float
    cost_usd: float

    @classmethod
    def of(cls, name: str, used: Sequence[Used]) -> FunctionRow:
        """One row for all of these figures together."""
        return cls(
            name=name,
            invocations=sum(one.invocations for one in used),
            cold_starts=sum(one.cold_starts for one in used),
            busy_device_s=sum(one.busy_device_s for one in used),
            idle_device_s=sum(one.idle_device_s for one in used),
            cold_device_s=sum(one.cold_device_s for one in used),
            cost_usd=sum(one.cost_usd for one in used),
        )


@dataclass(frozen=True, slots=True)
class FinalReport:
    """The contents of the report."""

    title: str
    """Such as `run demo-7f3a succeeded`."""
    steps: int
    wall_s: float
    replicas_lost: int
    """Replicas that were lost, and replaced if they were still needed."""
    steps_again: int
    """Steps that were done again after a fault."""
    evaluations: tuple[EvaluationRow, ...]
    functions: tuple[FunctionRow, ...]
    total: FunctionRow
    files: tuple[tuple[str, Path | str], ...]
    """Files and folders by name, such as `("checkpoint", Path(...))`."""


def render_report(report: FinalReport) -> RenderableType:
    """The report, for `Console.show`."""
    spent = f"{count(report.steps)} steps in {clock(report.wall_s)} for {money(report.total.cost_usd)}"
    parts: list[RenderableType] = ["", Text.assemble((report.title, "bold"), f"  {spent}"), ""]
    if recovered := _recovered(report):
        parts += [f"recovered: {recovered}", ""]
    if report.evaluations:
        parts += [_evaluations(report.evaluations), ""]
    parts += [functions_table(report.functions, report.total), "", _files(report)]
    return Group(*parts)


def _recovered(report: FinalReport) -> str:
    """Such as `3 replicas lost, 1 step done again`; empty if there was no fault."""
    lost, again = report.replicas_lost, report.steps_again
    parts = [f"{count(lost)} replica{'s' * (lost != 1)} lost"] if lost else []
    parts += [f"{count(again)} step{'s' * (again != 1)} done again"] if again else []
    return ", ".join(parts)


def _evaluations(rows: tuple[EvaluationRow, ...]) -> Table:
    table = _table("held-out prompts", "before", "after", "change")
    for row in rows:
        change = None if row.before is None or row.after is None else row.after - row.before
        sign = "+" if change is not None and change >= 0 else ""
        table.add_row(row.name, decimal(row.before), decimal(row.after), sign + decimal(change))
    return table


def functions_table(functions: Sequence[FunctionRow], total: FunctionRow) -> Table:
    """Device-seconds and cost of each function, and of all."""
    table = _table("device-seconds", "busy", "idle", "cold", "held", "busy %", "calls", "starts", "cost")
    for row in functions:
        _add(table, row)
    _add(table, total, style="bold")
    return table


def _add(table: Table, row: FunctionRow, style: str = "") -> None:
    held = row.busy_device_s + row.idle_device_s + row.cold_device_s
    table.add_row(
        row.name,
        decimal(row.busy_device_s, 1),
        decimal(row.idle_device_s, 1),
        decimal(row.cold_device_s, 1),
        decimal(held, 1),
        decimal(100 * row.busy_device_s / held if held else None, 0),
        count(row.invocations),
        count(row.cold_starts),
        money(row.cost_usd),
        style=style,
    )


def _files(report: FinalReport) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, path in report.files:
        # Folded, never cut: a path is there to be copied.
        grid.add_row(name, Text(str(path), overflow="fold"))
    return grid


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True)
    for title in others:
        table.add_column(title, justify="right")
    return table
