"""The tables of `rlhfless simulate`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfless.cli.tables import table
from rlhfless.sim.experiment.arrivals import Arrivals, ClusterSpeeds
from rlhfless.sim.experiment.compare import PolicyComparison, quoted_part
from rlhfless.sim.experiment.figures import ResultRow
from rlhfless.sim.experiment.shared import Arrangement
from rlhfless.sim.replay.beside import Beside
from rlhfless.sim.replay.measured import WALL
from rlhfless.sim.replay.replay import Replay
from rlhfless.sim.report.page import COLUMNS, ReportColumn
from rlhfless.sim.report.verdict import (
    PARTS,
    arrangements_verdict,
    best_fleets,
    contract_text,
    missed,
    unused,
    verdict,
)
from rlhfless.sim.scenarios import Scenario
from rlhfless.sim.statistics import CONFIDENCE, LEAST_VALUES
from rlhfless.telemetry.terminal import Prose, decimal, money

HALVES = (COLUMNS[:5], COLUMNS[5:])
"""Two tables, results and causes: side by side they would not fit a terminal of 80 columns."""


def comparison_table(comparison: PolicyComparison) -> RenderableType:
    """Render a row per policy: means over the seeds, with the ends of the confidence interval below."""
    scenario, part = comparison.scenario, quoted_part(comparison.scenario)
    rows = comparison.rows(part)
    few = scenario.seeds < LEAST_VALUES
    seeds = f"{scenario.seeds} seed{'s' * (scenario.seeds != 1)}"
    what = f"{PARTS[part]} of {scenario.steps} steps, {seeds}; simulated"
    ends = f"{seeds}: no interval." if few else f"dim: the ends of the {CONFIDENCE:.0%} confidence interval."
    legend = f"{ends} times: by the first policy, in pairs of equal seeds."
    title = Text.assemble((scenario.name, "bold"), f"  {what}\n", f"contract: {contract_text(scenario.contract)}")
    parts = [part for columns in HALVES for part in ("", _table(rows, columns))]
    notes = [*filter(None, [best_fleets(comparison)]), *missed(comparison), *unused(comparison)]
    decided = verdict(comparison)
    last = ("", Prose(decided, style="bold")) if decided else ()
    return Group(title, *parts, "", *map(Prose, notes), Prose(legend, style="dim"), *last)


def arrangements_table(scenario: Scenario, runs: int, arrangements: Sequence[Arrangement]) -> RenderableType:
    """Render a row per arrangement of several runs on the cluster, compared with the first."""
    first = arrangements[0]
    titles = "all ended\ns", "\nx", "mean end\ns", "\nx", "devices used\n%", "kept\n% of runs"
    made = table(f"{runs} runs", *titles, padding=1)
    for each in arrangements:
        sooner, mean = first.makespan_s / each.makespan_s, first.mean_end_s / each.mean_end_s
        ends = f"{each.makespan_s:,.0f}", f"{sooner:.2f}", f"{each.mean_end_s:,.0f}", f"{mean:.2f}"
        kept = "-" if each.kept is None else f"{100 * each.kept:.0f}"
        made.add_row(each.name, *ends, f"{100 * each.used:.0f}", kept)
    heading = Text.assemble((scenario.name, "bold"), f"  {scenario.steps} steps of each run; simulated")
    legend = Text(
        "x: by the first row. kept: a deadline in seconds. Each run is `cost_aware` alone, time first.",
        style="dim",
    )
    decided = arrangements_verdict(runs, arrangements)
    return Group(heading, "", made, "", legend, *(("", Prose(decided, style="bold")) if decided else ()))


def arrivals_table(speeds: ClusterSpeeds, title: str, what: str, rows: Sequence[Arrivals]) -> RenderableType:
    """Render the ways to place arriving runs: a row per way, or, of several loads, a row per load."""
    made = _loads_table(rows) if len(rows) > 1 else _ways_table(rows[0])
    times = ", ".join(f"{size}: {seconds:,.0f}" for size, seconds in speeds.curve.step_s.items())
    legend = Prose(
        "by alone: mean of a run's time from arrival to end, by its time alone on all devices. load: the share of the "
        "greatest throughput of equal parts that the runs need. best static: the best of all divisions in hindsight. "
        f"Seconds per step by number of devices: {times}",
        style="dim",
    )
    gains = sorted(row.gain for row in rows)
    span = f"{gains[0]:.2f} to {gains[-1]:.2f}" if len(gains) > 1 else f"{gains[0]:.2f}"
    text = f"Elastic runs end {span} times as soon as with the static division that is best in hindsight."
    if len(rows) == 1:
        sooner = min(way.makespan_s for way in rows[0].static) / rows[0].elastic.makespan_s
        text += f" All have ended {sooner:.2f} times as soon as with the division with the earliest end."
    heading = Text.assemble((title, "bold"), f"  {what}; simulated")
    return Group(heading, "", made, "", legend, "", Prose(text, style="bold"))


def _loads_table(rows: Sequence[Arrivals]) -> Table:
    first = rows[0]
    names = ["unequal parts" if row.unequal else row.name for row in first.static]
    names += ["in turns"] if first.turns else []
    made = table("by alone", *names, "elastic", "changes", "best static", "best static\n/ elastic", padding=1)
    for row in rows:
        ways = (*row.static, *([row.turns] if row.turns else []), row.elastic)
        cells = [f"{way.by_alone:.2f}" for way in ways]
        made.add_row(row.label, *cells, f"{row.elastic.changes}", row.best_static.name, f"{row.gain:.2f}")
    return made


def _ways_table(row: Arrivals) -> Table:
    made = table(row.label, "by alone\n", "mean\ns", "all ended\ns", "changes\n", padding=1)
    for way in (*row.static, *([row.turns] if row.turns else []), row.elastic):
        made.add_row(way.name, f"{way.by_alone:.2f}", f"{way.mean_s:,.0f}", f"{way.makespan_s:,.0f}", f"{way.changes}")
    return made


def _table(rows: Sequence[ResultRow], columns: Sequence[ReportColumn]) -> Table:
    made = table("policy", *(f"{column.title}\n{column.unit}" for column in columns), padding=1)
    for shown, column in zip(made.columns[1:], columns, strict=True):
        shown.min_width = max(len(text) for row in rows for text in (column.text(row), *column.limits(row)))
    for row in rows:
        cells = [
            "\n".join((column.text(row), *(f"[dim]{end}[/dim]" for end in column.limits(row)))) for column in columns
        ]
        made.add_row(row.label, *cells)
    return made


def beside_table(beside: Beside) -> RenderableType:
    """Render both replays and the measured run: mean seconds of a step by stage, cost, steps, and a summary."""
    other, base = beside.other, beside.base
    again = {error.stage: error.predicted_s for error in other.errors}
    means = table("seconds per step", f"{beside.label}\nsimulated", "as recorded\nsimulated", "as recorded\nmeasured")
    for stage in base.errors:
        figures = again.get(stage.stage), stage.predicted_s, stage.measured_s
        means.add_row(stage.stage, *(decimal(seconds) for seconds in figures))
    means.add_row("cost of all", *(money(usd) for usd in (other.predicted_usd, base.predicted_usd, base.measured_usd)))
    steps = table("step", "simulated", "as recorded, simulated", "measured", texts=0)
    for one, two in zip(other.steps, base.steps, strict=True):
        steps.add_row(
            str(one.step),
            *(decimal(s, 2) for s in (one.predicted_s[WALL], two.predicted_s[WALL])),
            decimal(one.measured_s[WALL], 2),
        )
    to = f"; extrapolated to {other.extrapolated_to}, not measured" if other.extrapolated_to else ""
    title = Text.assemble((other.run_id, "bold"), f"  {beside.label}; fitted to {other.fitted_to}{to}")
    return Group(title, "", means, "", steps, "", Prose(beside.sentence))


def replay_table(again: Replay) -> RenderableType:
    """Render predicted and measured seconds by stage, of every step and over all."""
    stages = [error.stage for error in again.errors]
    steps = table("step", *stages, texts=0)
    for column in steps.columns[1:]:
        column.no_wrap = True
    for step in again.steps:
        pairs = [(step.predicted_s[stage], step.measured_s[stage]) for stage in stages]
        steps.add_row(str(step.step), *(f"{predicted:.2f} / {measured:.2f}" for predicted, measured in pairs))
    over_all = table("seconds per step", "predicted", "measured", "median error %", "of the mean %", "skill")
    for error in again.errors:
        shares = (decimal(100 * share, 1) for share in (error.error, error.error_of_mean))
        over_all.add_row(
            error.stage, decimal(error.predicted_s), decimal(error.measured_s), *shares, decimal(error.skill)
        )
    prompts = [
        f"prompt tokens computed / unique, {each.function}  "
        f"{each.predicted:.2f} predicted, {each.measured:.2f} measured"
        for each in again.prompt_tokens
    ]
    cost = f"{money(again.predicted_usd)} predicted, {money(again.measured_usd)} measured"
    legend = (
        "above: predicted / measured seconds. of the mean: the median error of always predicting the mean of the "
        "fitted steps. skill: 1 - error / error of the mean."
    )
    faults = [str(step.step) for step in again.steps if step.done_again]
    if faults:
        legend += (
            f" Steps {', '.join(faults)} were done again after a fault: measured is their last try, and the errors and "
            "means leave them out."
        )
    kv = "not in the trace: assumed to suffice"
    if again.kv_tokens is not None:
        kv = f"{again.kv_tokens:,} tokens, as the engines reported"
    title = Text.assemble((again.run_id, "bold"), f"  {again.policy}; fitted to {again.fitted_to}")
    facts = f"cost of these steps  {cost}", *prompts, f"KV memory of an actor  {kv}"
    pace = [Prose(again.changed_pace)] if again.changed_pace else []
    last: tuple[RenderableType, ...] = (*facts, *pace, Prose(legend, style="dim"))
    return Group(title, "", steps, "", over_all, "", *last)
