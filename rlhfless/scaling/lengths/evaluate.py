"""The quality of length forecasts on a trace: forecast each step from the earlier steps, and compare. Pure.

The predictor is compared with two forecasts of one number each: the mean length of the run so far, and the mean length
of the prompt's last visit (RLHFless as published; the run's mean for a new prompt). All have the same data.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhfless.records.schema import TraceError
from rlhfless.records.traces import Trace
from rlhfless.scaling.lengths.forecast import QUANTILE_LEVELS, Forecast
from rlhfless.scaling.lengths.predictor import LengthPredictor
from rlhfless.scaling.lengths.replay import StepLengths, max_tokens_of, steps_of
from rlhfless.scaling.lengths.samples import Array


@dataclass(frozen=True, slots=True)
class ForecastScore:
    """The score of one forecaster, over all steps but the first."""

    name: str
    samples: int
    rank_correlation: float | None
    """Spearman's, of expected and real length within a step, averaged; None if the forecast is constant."""
    coverage: Array | None
    """[Q]: share of lengths at or below each quantile; None for a forecast that is one number."""
    pinball_tokens: float
    """Mean pinball loss over QUANTILE_LEVELS: the error of a distribution, in tokens."""


def evaluate(trace: Trace) -> list[ForecastScore]:
    """Scores of both baselines and of the predictor: before each step, and when half of its samples have finished.

    Raises TraceError if fewer than two steps have rollouts.
    """
    steps = steps_of(trace)
    if len(steps) < 2:
        raise TraceError(
            f"the trace of {trace.meta.run_id} has rollouts of {len(steps)} steps; forecasts need 2, one to learn from"
        )
    predictor = LengthPredictor(max_tokens_of(trace))
    run_mean, last = _Tally("mean of the run"), _Tally("prompt's last visit")
    ours, half = _Tally("forecast"), _Tally("forecast at half time")
    seen = _Seen()
    for index, lengths in enumerate(steps):
        lengths.begin(predictor)
        before = predictor.forecast(lengths.step)
        lengths.tell(predictor, _half_time_s(lengths))
        midway = predictor.forecast(lengths.step)
        lengths.tell(predictor)
        predictor.step_ended(lengths.step)
        if index:
            before, real = _compare(before, lengths)
            run_mean.add_points(np.full(len(real), seen.run_mean), real)
            last.add_points(np.array([seen.last_mean(before.prompt_ids[row]) for row in before.prompt]), real)
            ours.add(before, real)
            half.add(*_compare(midway, lengths))
        seen.add(lengths)
    return [tally.score() for tally in (run_mean, last, ours, half)]


def pinball(quantiles: Array, real: Array) -> Array:
    """Pinball loss [samples, Q] of quantiles [samples, Q] at QUANTILE_LEVELS, against what came [samples]."""
    above = real[:, None] - quantiles
    loss: Array = np.maximum(QUANTILE_LEVELS * above, (QUANTILE_LEVELS - 1) * above)
    return loss


def spearman(first: Array, second: Array) -> float | None:
    """Spearman's rank correlation; ties share their mean rank. None if either is constant."""
    one, two = _ranks(first), _ranks(second)
    spread = float(np.sqrt(one.var() * two.var()))
    return float(((one - one.mean()) * (two - two.mean())).mean()) / spread if spread > 0 else None


def _ranks(values: Array) -> Array:
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2
    ranks: Array = mean_rank[inverse]
    return ranks


@dataclass(slots=True)
class _Tally:
    name: str
    samples: int = 0
    _pinball: float = 0.0
    _covered: Array | None = None
    _correlations: list[tuple[float, int]] = field(default_factory=list)

    def add(self, forecast: Forecast, real: Array) -> None:
        if not len(real):
            return
        covered = (real[:, None] <= forecast.total_tokens).sum(axis=0).astype(np.float64)
        self._covered = covered if self._covered is None else self._covered + covered
        self._add(forecast.total_tokens, forecast.tokens + forecast.mean_tokens, real)

    def add_points(self, expected: Array, real: Array) -> None:
        self._add(expected[:, None], expected, real)

    def _add(self, quantiles: Array, expected: Array, real: Array) -> None:
        self.samples += len(real)
        self._pinball += float(pinball(quantiles, real).mean(axis=1).sum())
        correlation = spearman(expected, real)
        if correlation is not None:
            self._correlations.append((correlation, len(real)))

    def score(self) -> ForecastScore:
        ranked = sum(count for _, count in self._correlations)
        correlation = math.fsum(value * count for value, count in self._correlations) / ranked if ranked else None
        samples = max(self.samples, 1)
        covered = None if self._covered is None else self._covered / samples
        return ForecastScore(self.name, self.samples, correlation, covered, self._pinball / samples)


class _Seen:
    """The history of the baselines."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._total = 0
        self._count = 0

    @property
    def run_mean(self) -> float:
        return self._total / self._count

    def last_mean(self, prompt_id: str) -> float:
        return self._last.get(prompt_id, self.run_mean)

    def add(self, lengths: StepLengths) -> None:
        by_prompt: dict[str, list[int]] = defaultdict(list)
        for rollout in lengths.rollouts:
            by_prompt[rollout.prompt_id].append(rollout.response_tokens)
        self._last |= {prompt_id: _mean(tokens) for prompt_id, tokens in by_prompt.items()}
        self._total += sum(rollout.response_tokens for rollout in lengths.rollouts)
        self._count += len(lengths.rollouts)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def _half_time_s(lengths: StepLengths) -> float:
    finished = sorted(rollout.finished_s for rollout in lengths.rollouts)
    return finished[len(finished) // 2]


def _compare(forecast: Forecast, lengths: StepLengths) -> tuple[Forecast, Array]:
    """What was forecast and came: the forecast of samples that are in the trace, and their lengths [samples]."""
    by_key = {(rollout.prompt_id, rollout.sample_index): rollout.response_tokens for rollout in lengths.rollouts}
    keys = zip((forecast.prompt_ids[row] for row in forecast.prompt), forecast.sample.tolist(), strict=True)
    real = np.array([by_key.get(key, math.nan) for key in keys])
    known = ~np.isnan(real)
    return forecast.take(known), real[known]
