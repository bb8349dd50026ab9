"""The pictures of a comparison."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from rlhfless.records.traces import Trace
from rlhfless.sim.experiment.compare import PolicyComparison, quoted_part
from rlhfless.sim.experiment.forecasts import LengthForecasts, length_forecasts
from rlhfless.sim.report.charts import ParetoPoint, gantt, length_distribution, pareto, scatter
from rlhfless.sim.report.words import PARTS
from rlhfless.spec import CheapestSpec

MOST_DOTS = 2000
"""Responses in the picture of forecasts: more would only make it heavy."""


@dataclass(frozen=True)
class Pictures:
    """The figures, and the data of their captions."""

    pareto: Figure
    lengths: Figure
    forecasts: Figure
    forecast_figures: LengthForecasts
    gantts: dict[str, Figure]
    """By policy."""
    step: int
    """The step that the Gantt charts show."""

    @property
    def by_name(self) -> dict[str, Figure]:
        """By the name of the file."""
        gantts = {f"gantt-{label}": figure for label, figure in self.gantts.items()}
        return {"pareto": self.pareto, "lengths": self.lengths, "forecasts": self.forecasts, **gantts}


def pictures(comparison: PolicyComparison, step: int | None = None) -> Pictures:
    """All pictures, from the runs of the first seed. `step` is the step of the Gantt charts; by default the step with
    the median time of the quoted part, under the first policy. Raises ValueError for an unknown step."""
    scenario, part = comparison.scenario, quoted_part(comparison.scenario)
    traces = {label: runs[0].trace for label, runs in comparison.results.items()}
    batches = next(runs[0].batches for runs in comparison.results.values() if runs[0].batches)
    chosen = _median_step(comparison) if step is None else step
    if not 1 <= chosen <= scenario.steps:
        raise ValueError(f"step is {chosen}; the scenario has steps 1 to {scenario.steps}")
    points = [ParetoPoint(row.label, row.step_usd, row.step_s) for row in comparison.rows(part)]
    lengths = {"first step": batches[0].response_tokens, "last step": batches[-1].response_tokens}
    lengths = {"all steps": np.concatenate([batch.response_tokens for batch in batches]), **lengths}
    forecasts = length_forecasts(batches, scenario.max_tokens)
    every = max(len(forecasts.real_tokens) // MOST_DOTS, 1)
    return Pictures(
        pareto(points, f"{scenario.name}: cost and time, {PARTS[part]}"),
        length_distribution(lengths, f"{scenario.name}: response lengths"),
        scatter(
            forecasts.expected_tokens[::every],
            forecasts.real_tokens[::every],
            "response tokens",
            f"{scenario.name}: lengths, forecast before each step and real",
        ),
        forecasts,
        {
            label: _gantt(label, trace, chosen, _deadline_s(comparison, label, chosen))
            for label, trace in traces.items()
            if trace is not None
        },
        chosen,
    )


def _deadline_s(comparison: PolicyComparison, label: str, step: int) -> float | None:
    """The deadline of a step in the run of the first seed; of several steps together, the step's even share."""
    contracts = comparison.contracts[label]
    figures = next(each for each in comparison.results[label][0].steps if each.step == step)
    return figures.limit if isinstance(contracts[0], CheapestSpec) else None


def _gantt(label: str, trace: Trace, step: int, deadline_s: float | None) -> Figure:
    record = next(record for record in trace.steps if record.step == step)
    calls = [call for call in trace.invocations if call.end_s > record.start_s and call.start_s < record.end_s]
    return gantt(trace.holdings, calls, record.start_s, record.end_s, f"{label}: step {step}", deadline_s)


def _median_step(comparison: PolicyComparison) -> int:
    first = next(iter(comparison.results.values()))[0].steps
    later = first[comparison.scenario.epoch_steps :] or first
    ordered = sorted(later, key=lambda figures: figures.step_s)
    return ordered[len(ordered) // 2].step
