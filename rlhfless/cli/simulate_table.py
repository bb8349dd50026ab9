"""The tables of `rlhfless simulate`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfless.sim.experiment.compare import PolicyComparison, quoted_part
from rlhfless.sim.experiment.rows import ResultRow
from rlhfless.sim.experiment.shared import Arrangement
from rlhfless.sim.report.columns import COLUMNS, ReportColumn
from rlhfless.sim.report.words import PARTS, contract_text, infeasible
from rlhfless.sim.scenarios import Scenario

HALVES = (COLUMNS[:5], COLUMNS[5:])
"""Two tables, results and causes: side by side they would not fit a terminal of 80 columns."""


def comparison_table(comparison: PolicyComparison) -> RenderableType:
    """One row per policy: means over the seeds, and below each the half width of its confidence interval."""
    scenario, part = comparison.scenario, quoted_part(comparison.scenario)
    rows = comparison.rows(part)
    what = f"{PARTS[part]} of {scenario.steps} steps, {scenario.seeds} seeds; simulated"
    legend = "dim: half of the 95 % confidence interval. times: by the first policy, in pairs of equal seeds."
    title = Text.assemble((scenario.name, "bold"), f"  {what}\n", f"contract: {contract_text(scenario.contract)}")
    parts = [part for columns in HALVES for part in ("", _table(rows, columns))]
    return Group(title, *parts, "", *infeasible(comparison), Text(legend, style="dim"))


def arrangements_table(scenario: Scenario, runs: int, made: Sequence[Arrangement]) -> RenderableType:
    """One row per arrangement of several runs on the cluster, beside the first."""
    first = made[0]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(f"{runs} runs", no_wrap=True)
    for title in ("all ended\ns", "\nx", "mean end\ns", "\nx", "devices used\n%"):
        table.add_column(title, justify="right")
    for each in made:
        sooner, mean = first.makespan_s / each.makespan_s, first.mean_end_s / each.mean_end_s
        ends = f"{each.makespan_s:,.0f}", f"{sooner:.2f}", f"{each.mean_end_s:,.0f}", f"{mean:.2f}"
        table.add_row(each.name, *ends, f"{100 * each.used:.0f}")
    heading = Text.assemble((scenario.name, "bold"), f"  {scenario.steps} steps of each run; simulated")
    return Group(
        heading, "", table, "", Text("x: by the first row. Each run is `cost_aware` alone, time first.", style="dim")
    )


def _table(rows: Sequence[ResultRow], columns: Sequence[ReportColumn]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("policy", no_wrap=True)
    for column in columns:
        widest = max(len(text) for row in rows for text in (column.text(row), column.half(row)))
        table.add_column(f"{column.title}\n{column.unit}", justify="right", min_width=widest)
    for row in rows:
        cells = [
            column.text(row) + (f"\n[dim]{half}[/dim]" if (half := column.half(row)) else "") for column in columns
        ]
        table.add_row(row.label, *cells)
    return table
