"""Render a comparison as one self-contained HTML page, without scripts, fonts or pictures from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from operator import attrgetter

from rlhfless.sim.experiment.compare import PolicyComparison, quoted_part
from rlhfless.sim.experiment.figures import Part, ResultRow
from rlhfless.sim.report.verdict import PARTS, best_fleets, contract_text, missed, unused, verdict
from rlhfless.sim.scenarios.load import resolved_yaml
from rlhfless.sim.statistics import CONFIDENCE, LEAST_VALUES, Interval

LEAST_RANGE = 0.2
"""An axis shows at least this share of the figures below and above them."""

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


def page(comparison: PolicyComparison) -> str:
    """Return the report of a comparison as the text of one HTML page."""
    scenario, part = comparison.scenario, quoted_part(comparison.scenario)
    parts: list[Part] = [part] if part == "all" else ["later", "first", "all"]
    few = scenario.seeds < LEAST_VALUES
    intervals = "no intervals: too few seeds" if few else f"{CONFIDENCE:.0%} confidence intervals"
    body = [f"<h1>{escape(scenario.name)}</h1>", f"<p>{escape(scenario.description)}</p>"]
    body.append(
        f"<p>{scenario.steps} steps of {scenario.prompts_per_step} x {scenario.samples_per_prompt} responses, "
        f"{scenario.seeds} seeds. Simulated, not measured. Figures are means over the seeds with "
        f"{intervals}; times are by the first policy, in pairs of equal seeds.</p>"
    )
    body.append(f"<p>Contract: {escape(contract_text(scenario.contract))}. {escape(best_fleets(comparison))}</p>")
    body += [f"<p>{escape(line)}</p>" for line in (*missed(comparison), *unused(comparison))]
    body += [f"<p><b>{escape(line)}</b></p>" for line in filter(None, [verdict(comparison)])]
    for each in parts:
        body += [f"<h2>{PARTS[each].capitalize()}</h2>", _table(comparison.rows(each))]
    caption = f"{PARTS[part].capitalize()}. Lower left is better. Bars are intervals."
    picture = _pareto(comparison.rows(part))
    body += ["<h2>Cost and time</h2>", f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"]
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


def _pareto(rows: Sequence[ResultRow]) -> str:
    """Plot cost against time as SVG, with confidence intervals; lower left is better."""
    width, height, margin = 760.0, 400.0, 56.0
    costs, times = ([pick(row) for row in rows] for pick in (attrgetter("step_usd"), attrgetter("step_s")))

    def place(value: float, values: Sequence[Interval], start: float, end: float) -> float:
        least, most = _limits(values)
        return start + (end - start) * (value - least) / (most - least)

    x = partial(place, values=costs, start=margin, end=width - margin)
    y = partial(place, values=times, start=height - margin, end=margin / 2)
    parts = [f'<path d="M{margin} {margin / 2}V{height - margin}H{width - margin}" fill="none" stroke="#333"/>']
    for low, high in ((_limits(costs), _limits(times)),):
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            usd, seconds = low[0] + share * (low[1] - low[0]), high[0] + share * (high[1] - high[0])
            parts.append(f'<text x="{x(usd):.1f}" y="{height - 36}" text-anchor="middle">{usd:,.4g}</text>')
            parts.append(f'<text x="{margin - 6}" y="{y(seconds) + 4:.1f}" text-anchor="end">{seconds:,.4g}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">US dollars per step</text>')
    parts.append('<text x="8" y="14">seconds per step</text>')
    for row, usd, seconds in zip(rows, costs, times, strict=True):
        across, up = x(usd.mean), y(seconds.mean)
        # An interval may reach below 0, unlike costs and times.
        bars = f"M{x(max(usd.low, 0)):.1f} {up:.1f}H{x(usd.high):.1f}M{across:.1f} {y(max(seconds.low, 0)):.1f}"
        parts.append(f'<path d="{bars}V{y(seconds.high):.1f}" stroke="#bbb" fill="none"/>')
        parts.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="4" fill="#0072b2"/>')
        parts.append(f'<text x="{across + 7:.1f}" y="{up - 6:.1f}">{escape(row.label)}</text>')
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" font-size="11">{"".join(parts)}</svg>'


def _limits(values: Sequence[Interval]) -> tuple[float, float]:
    """Return the limits of an axis: at least LEAST_RANGE around the means, so that small differences do not fill it."""
    means = [each.mean for each in values]
    low = min((1 - LEAST_RANGE) * max(means), *(max(each.low, 0.0) for each in values))
    return low, max((1 + LEAST_RANGE) * min(means), *(each.high for each in values), low + 1e-9)


DASH = "-"


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """One figure of the table."""

    title: str
    unit: str
    pick: Callable[[ResultRow], Interval | None]
    digits: int
    percent: bool = False

    def text(self, row: ResultRow) -> str:
        """Return the mean as text."""
        interval = self.pick(row)
        return DASH if interval is None else self._number(interval.mean)

    def limits(self, row: ResultRow) -> tuple[str, ...]:
        """Return both ends of the interval; empty if it is the mean alone."""
        interval = self.pick(row)
        if interval is None or interval.low == interval.high:
            return ()
        return self._number(interval.low), self._number(interval.high)

    def _number(self, value: float) -> str:
        return f"{100 * value:,.{self.digits}f}" if self.percent else f"{value:,.{self.digits}f}"


COLUMNS = (
    ReportColumn("time", "s per step", lambda row: row.step_s, 1),
    ReportColumn("cost", "$ per step", lambda row: row.step_usd, 4),
    ReportColumn("$ / 1M tokens", "of responses", lambda row: row.usd_per_million_tokens, 2),
    ReportColumn("speed-up", "times", lambda row: row.speed_up, 2),
    ReportColumn("cost", "times", lambda row: row.cost_ratio, 2),
    ReportColumn("busy", "device-s per step", lambda row: row.busy_device_s, 0),
    ReportColumn("idle", "device-s per step", lambda row: row.idle_device_s, 0),
    ReportColumn("cold", "device-s per step", lambda row: row.cold_device_s, 0),
    ReportColumn("busy / held", "%", lambda row: row.utilisation, 0, percent=True),
    ReportColumn("p50", "s", lambda row: row.p50_s, 1),
    ReportColumn("p99", "s", lambda row: row.p99_s, 1),
    ReportColumn("kept", "% of steps", lambda row: row.kept, 0, percent=True),
    ReportColumn("regret", "% above the clairvoyant", lambda row: row.regret, 1, percent=True),
)
