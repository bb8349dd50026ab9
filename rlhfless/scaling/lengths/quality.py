"""The quality of length forecasts on a trace: each step is forecast from the steps before it. Pure.

The predictor is compared with two forecasts of one number each: the mean length of the run so far, and the mean length
of the prompt's last visit (RLHFless as published; the run's mean for a new prompt). All have the same data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rlhfless.records.schema import TraceError
from rlhfless.records.traces import Trace
from rlhfless.scaling.lengths.levels import Array, Forecast
from rlhfless.scaling.lengths.predictor import LengthPredictor
from rlhfless.scaling.lengths.recorded import max_tokens_of, pinball, samples_at, spearman, steps_of


@dataclass(slots=True)
class ForecastScore:
    """The score of one forecaster, over all steps but the first."""

    name: str
    samples: int = 0
    _pinball: float = 0.0
    _covered: Array | float = 0.0
    _correlations: list[tuple[float, int]] = field(default_factory=list)

    def add(self, forecast: Forecast, lengths: Array) -> None:
        """Add a step's forecast and the actual `lengths` [samples]."""
        quantiles, real = forecast.total_tokens, lengths[forecast.rows]
        self._covered = self._covered + (real[:, None] <= quantiles).sum(axis=0)
        self._add(quantiles, forecast.kind_tokens[forecast.kind] + forecast.mean_tokens, real)

    def add_points(self, expected: Array, real: Array) -> None:
        """Add a forecast of one number for each sample: both [samples]."""
        self._add(expected[:, None], expected, real)

    def _add(self, quantiles: Array, expected: Array, real: Array) -> None:
        if not real.size:
            return
        self.samples += real.size
        self._pinball += float(pinball(quantiles, real).mean(axis=1).sum())
        correlation = spearman(expected, real)
        if correlation is not None:
            self._correlations.append((correlation, real.size))

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, of expected and real length within a step, averaged; None if the forecast is constant."""
        ranked = sum(count for _, count in self._correlations)
        return math.fsum(value * count for value, count in self._correlations) / ranked if ranked else None

    @property
    def coverage(self) -> Array | None:
        """[Q]: share of lengths at or below each quantile; None for a forecast that is one number."""
        return None if isinstance(self._covered, float) else self._covered / max(self.samples, 1)

    @property
    def pinball_tokens(self) -> float:
        """Mean pinball loss over QUANTILE_LEVELS: the error of a distribution, in tokens."""
        return self._pinball / max(self.samples, 1)


def score_forecasts(trace: Trace) -> list[ForecastScore]:
    """Score both baselines and the predictor, before each step and when half of its samples have finished.

    Raises TraceError if fewer than two steps have rollouts.
    """
    steps = steps_of(trace)
    if len(steps) < 2:
        raise TraceError(
            f"the trace of {trace.meta.run_id} has rollouts of {len(steps)} steps; forecasts need 2, one to learn from"
        )
    predictor = LengthPredictor(max_tokens_of(trace))
    names = "mean of the run", "prompt's last visit", "forecast", "forecast at half time"
    run_mean, last, before, half = scores = [ForecastScore(name) for name in names]
    last_mean: dict[str, float] = {}
    total = count = 0.0
    for rollouts in steps:
        samples = samples_at(rollouts)
        lengths = np.asarray(samples.tokens, np.float64)
        if count:
            run_mean.add_points(np.full(lengths.size, total / count), lengths)
            of_prompt = np.array([last_mean.get(prompt_id, total / count) for prompt_id in samples.prompt_ids])
            last.add_points(of_prompt[samples.prompt], lengths)
            before.add(predictor.forecast(samples_at(rollouts, -math.inf)), lengths)
            ends_s = sorted(rollout.finished_s for rollout in rollouts)
            half.add(predictor.forecast(samples_at(rollouts, ends_s[len(ends_s) // 2])), lengths)
        predictor.learn(samples)
        means = np.bincount(samples.prompt, lengths) / np.bincount(samples.prompt)
        last_mean.update(zip(samples.prompt_ids, means.tolist(), strict=True))
        total, count = total + float(lengths.sum()), count + lengths.size
    return scores
