"""The band of a prediction from an earlier run: how far that run's steps were from their own prediction. Pure.

A prediction of the earlier run, made in the same way, shows the error of such predictions: its steps took `ratio` times
as long. A run of n steps is then expected to take n x ratio x predicted, and its mean step is within

    t(m - 1) x cv x sqrt(1 / m + 1 / n)     the prediction interval of a mean of n from m measured steps, and
    z x between                             the difference between runs on the same devices, and
    z x far x |log(step / measured step)|   the error for a step of another size; the last two are assumptions,

added as squares. cv is the standard deviation of the measured steps divided by their mean. Since times are positive,
the limits are mean / f and mean x f with f = exp(half). The first step is excluded: its extra time is added once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, stdev

from rlhfless.planning.objects import PlannedCost
from rlhfless.records.traces import Trace
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.sim.replay.measured import WALL, measured_s
from rlhfless.sim.statistics import student_quantile

BAND = 0.9
"""Share of runs that end within their band."""

BETWEEN_RUNS, BETWEEN_RUNS_CPU = 0.05, 0.25
"""Standard deviation of the mean step between repetitions of a run on the same devices, relative to its mean.
Assumptions: a single earlier run cannot tell. CPU cores are shared: on this project's machine the same run took up
to twice as long.
"""

FAR = 0.1
"""Additional relative error of the prediction for a step that is e times as large."""

WIDEST = 4.0
"""Maximum ratio between the limits of a band and its mean: as with data sheets and assumed lengths."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """The steps of an earlier run compared with their prediction."""

    run_id: str
    steps: int
    """Number of measured steps, excluding the first."""
    ratio: float
    """Mean measured step divided by the predicted one."""
    cv: float | None
    """None with fewer than two steps."""
    step_s: float
    """Mean measured step, in seconds."""
    warm_up_s: float
    """Extra time of the first step compared with the median of the others."""
    between: float

    @classmethod
    def of(cls, trace: Trace, predicted_s: float | None, kind: str) -> Scatter | None:
        """Return the scatter of a trace, or None without a measurable step.

        `predicted_s` is the predicted mean step of that run. If it is None, the prediction counts as exact.
        """
        rows = [record for record in trace.steps if record.step > 0 and record.resumed_s <= record.start_s]
        seconds = [measured_s(record, trace)[WALL] for record in rows]
        first = seconds[:1] if rows and rows[0].step == 1 else []
        steady = seconds[len(first) :] or seconds
        if not steady or fmean(steady) <= 0:
            return None
        return cls(
            trace.meta.run_id,
            len(steady),
            1.0 if predicted_s is None else fmean(steady) / predicted_s,
            stdev(steady) / fmean(steady) if len(steady) > 1 else None,
            fmean(steady),
            max(first[0] - median(steady), 0.0) if first else 0.0,
            BETWEEN_RUNS_CPU if kind == CPU_KIND else BETWEEN_RUNS,
        )

    def factor(self, steps: int, step_s: float) -> float:
        """Return the factor by which a run of `steps` steps of `step_s` seconds may be longer or shorter."""
        if self.cv is None:
            return WIDEST
        own = student_quantile((1 + BAND) / 2, self.steps - 1) * self.cv * math.sqrt(1 / self.steps + 1 / steps)
        other = math.hypot(self.between, FAR * math.log(step_s / self.step_s))
        return min(math.exp(math.hypot(own, NormalDist().inv_cdf((1 + BAND) / 2) * other)), WIDEST)

    def banded(self, cost: PlannedCost) -> PlannedCost:
        """Return a cost with the mean and the band of such runs."""
        step_s = self.ratio * cost.step_s
        factor = self.factor(cost.steps, step_s)
        wall_s = cost.steps * step_s + self.warm_up_s
        usd = cost.cost_usd * wall_s / cost.wall_s
        return PlannedCost(
            steps=cost.steps,
            step_s=step_s,
            wall_s=wall_s,
            wall_low_s=wall_s / factor,
            wall_high_s=wall_s * factor,
            cost_usd=usd,
            cost_low_usd=usd / factor,
            cost_high_usd=usd * factor,
            band=self.text,
        )

    @property
    def text(self) -> str:
        """Describe what the band covers."""
        if self.cv is None:
            return f"a quarter to four times: {self.run_id} has one step, which says nothing of the scatter"
        return (
            f"{BAND:.0%} of such runs, by {self.steps} steps of {self.run_id}, which scatter by {self.cv:.0%}; "
            f"that runs differ by {self.between:.0%} is assumed"
        )
