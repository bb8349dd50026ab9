"""One HTML page that holds everything: no scripts, no fonts, no pictures from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rlhfless.scaling.lengths import QUANTILE_LEVELS
from rlhfless.sim.experiment.compare import PolicyComparison, quoted_part
from rlhfless.sim.experiment.rows import Part, ResultRow
from rlhfless.sim.report.charts import svg
from rlhfless.sim.report.columns import COLUMNS
from rlhfless.sim.report.pictures import Pictures
from rlhfless.sim.report.verdict import verdict
from rlhfless.sim.report.words import PARTS, best_fleets, contract_text, infeasible, unused
from rlhfless.sim.scenarios.load import resolved_yaml
from rlhfless.sim.statistics import CONFIDENCE, LEAST_VALUES

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; color: #555; vertical-align: bottom; }
small { color: #777; display: block; } figure { margin: 1em 0; } figure svg { width: 100%; height: auto; }
figcaption { color: #555; font-size: 13px; } pre { background: #f6f6f6; padding: 1em; overflow-x: auto; }
summary { cursor: pointer; color: #0060a0; }
"""


def page(comparison: PolicyComparison, pictures: Pictures) -> str:
    """The report of a comparison as the text of one HTML page."""
    scenario, part = comparison.scenario, quoted_part(comparison.scenario)
    parts: list[Part] = [part] if part == "all" else ["later", "first", "all"]
    few = scenario.seeds < LEAST_VALUES
    intervals = "no intervals, for which there are too few" if few else f"{CONFIDENCE:.0%} confidence intervals"
    body = [f"<h1>{escape(scenario.name)}</h1>", f"<p>{escape(scenario.description)}</p>"]
    body.append(
        f"<p>{scenario.steps} steps of {scenario.prompts_per_step} x {scenario.samples_per_prompt} responses, "
        f"{scenario.seeds} seeds. Simulated, not measured. Figures are means over the seeds with "
        f"{intervals}; times are by the first policy, in pairs of equal seeds.</p>"
    )
    body.append(f"<p>Contract: {escape(contract_text(scenario.contract))}. {escape(best_fleets(comparison))}</p>")
    body += [f"<p>{escape(line)}</p>" for line in (*infeasible(comparison), *unused(comparison))]
    body += [f"<p><b>{escape(line)}</b></p>" for line in filter(None, [verdict(comparison)])]
    for each in parts:
        body += [f"<h2>{PARTS[each].capitalize()}</h2>", _table(comparison.rows(each))]
    body += ["<h2>Cost and time</h2>", _figure(svg(pictures.pareto), "Lower left is better. Bars are intervals.")]
    body += [f"<h2>Devices in step {pictures.step}</h2>"]
    for index, (label, figure) in enumerate(pictures.gantts.items()):
        opened = " open" if index == 0 else ""
        body.append(f"<details{opened}><summary>{escape(label)}</summary>{_figure(svg(figure), '')}</details>")
    body += ["<h2>Response lengths</h2>", _figure(svg(pictures.lengths), escape(_source(comparison)))]
    body += ["<h2>Forecasts</h2>", _figure(svg(pictures.forecasts), _forecast_caption(pictures))]
    body.append(f"<h2>Scenario</h2><details><summary>every key</summary><pre>{escape(resolved_yaml(scenario))}</pre>")
    head = f'<meta charset="utf-8"><title>{escape(scenario.name)}</title><style>{STYLE}</style>'
    content = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{content}</details>\n</body></html>\n'


def _table(rows: Sequence[ResultRow]) -> str:
    head = "".join(f"<th>{escape(column.title)}<small>{escape(column.unit)}</small></th>" for column in COLUMNS)
    lines = []
    for row in rows:
        cells = "".join(
            f"<td>{column.text(row)}<small>{' to '.join(column.limits(row))}</small></td>" for column in COLUMNS
        )
        lines.append(f"<tr><td>{escape(row.label)}</td>{cells}</tr>")
    return f'<div class="wide"><table><tr><th>policy</th>{head}</tr>{"".join(lines)}</table></div>'


def _figure(picture: str, caption: str) -> str:
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def _source(comparison: PolicyComparison) -> str:
    workload = comparison.scenario.workload
    return str(getattr(workload, "source", "") or getattr(workload, "path", ""))


def _forecast_caption(pictures: Pictures) -> str:
    figures = pictures.forecast_figures
    rank = "none" if figures.rank_correlation is None else f"{figures.rank_correlation:.2f}"
    covered = ", ".join(
        f"{share:.3f} at or below the {level:g} quantile"
        for level, share in zip(QUANTILE_LEVELS.tolist(), figures.coverage.tolist(), strict=True)
        if level in (0.1, 0.5, 0.9, 0.99)
    )
    return (
        f"Mean error {figures.mean_error:.0%} of the mean length ({figures.mean_error_of_mean:.0%} for always saying "
        f"the mean); rank correlation within a step {rank}; share of the responses {covered}."
    )
