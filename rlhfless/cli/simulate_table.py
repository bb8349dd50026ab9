"""The tables of `rlhfless simulate`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfless.sim.experiment.compare import Comparison, quoted_part
from rlhfless.sim.report.columns import COLUMNS
from rlhfless.sim.report.pictures import PARTS
from rlhfless.sim.report.words import contract_text


def comparison_table(comparison: Comparison) -> RenderableType:
    """One row per policy: means over the seeds, and below each the half width of its confidence interval."""
    scenario, part = comparison.scenario, quoted_part(comparison.scenario)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("policy", no_wrap=True)
    for column in COLUMNS:
        table.add_column(f"{column.title}\n{column.unit}", justify="right")
    for row in comparison.rows(part):
        cells = [
            column.text(row) + (f"\n[dim]{half}[/dim]" if (half := column.half(row)) else "") for column in COLUMNS
        ]
        table.add_row(row.label, *cells)
    what = f"{PARTS[part]} of {scenario.steps} steps, {scenario.seeds} seeds; simulated"
    legend = "dim: half of the 95 % confidence interval. times: by the first policy, in pairs of equal seeds."
    title = Text.assemble((scenario.name, "bold"), f"  {what}\n", f"contract: {contract_text(scenario.contract)}")
    return Group(title, "", table, "", Text(legend, style="dim"))
