"""The length predictor of a run: samples of a step in, forecasts out. See the package docstring for the model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlhfless.scaling.lengths.levels import (
    QUANTILE_LEVELS,
    BoolArray,
    Forecast,
    Levels,
    StepSamples,
    evidence_of,
    moments,
    quantiles_beyond,
    update,
)

STEPS_KEPT = 0.9
"""Weight of all earlier steps at each new one: a memory of about ten steps, some thousands of samples."""

DRIFT_VARIANCE = 0.05**2
"""Between two visits a level drifts by a twentieth of the length, so that the last visits, of 8 samples each, count
most: the newest one a third. Without drift, a level would stop changing after many visits. Simulated levels do not
drift; their forecasts lose less than 0.2 % (pinball loss) through it, and 0.3 % with a drift of a tenth.
"""

LEAST_BETWEEN = 0.1
"""Minimum share of the variance of all lengths attributed to prompts; with 0 no level would ever be learned."""

FIRST_GUESS, FIRST_VARIANCE, FIRST_COUNT = 0.25, 1.0, 4.0
"""Prior of a response's length: a quarter of max_tokens, within a factor of e, weighted as 4 samples."""

FIRST_SPREAD, SPREAD_COUNT = 0.4, 16.0
"""Prior of the ratio between siblings' lengths: 1.5, weighted as 16 samples."""


class RunningMean:
    """A weighted mean that forgets old steps. It starts at `value`, which counts as `weight` samples."""

    def __init__(self, value: float, weight: float) -> None:
        self.value = value
        self._prior = (value * weight, weight)
        self._total = self._count = 0.0

    def add(self, total: float, count: float) -> None:
        """Add `count` samples that sum to `total`."""
        self._total = self._total * STEPS_KEPT + total
        self._count = self._count * STEPS_KEPT + count
        self.value = (self._prior[0] + self._total) / (self._prior[1] + self._count)


class LengthPredictor:
    """Learned response lengths of a run."""

    def __init__(self, max_tokens: int) -> None:
        """Initialise an untrained predictor of responses up to `max_tokens`. Raises ValueError if it is below 1."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; a response has at least 1 token")
        self.max_tokens = max_tokens
        first = math.log(max(max_tokens * FIRST_GUESS, 1.0))
        self._mean = RunningMean(first, FIRST_COUNT)
        self._square = RunningMean(first**2 + FIRST_VARIANCE, FIRST_COUNT)
        self._spread_variance = RunningMean(FIRST_SPREAD**2, SPREAD_COUNT)
        self._prompts: dict[str, tuple[float, float]] = {}
        """Distance of each prompt's level from the run's mean after its last visit, and the level's variance."""
        self._before: tuple[Sequence[str], Levels] | None = None
        """The prompts of the current step, and their levels before it."""

    def seen(self, prompt_ids: Sequence[str]) -> BoolArray:
        """Return whether each prompt [prompts] was in an earlier step."""
        return np.array([prompt_id in self._prompts for prompt_id in prompt_ids])

    def forecast(self, samples: StepSamples) -> Forecast:
        """Return the remaining tokens of the unfinished samples."""
        evidence, entry, first = evidence_of(samples)
        level = update(self._levels(samples.prompt_ids), self._spread, evidence)
        rows, unended = np.flatnonzero(~samples.ended), ~samples.ended[first]
        prompt, tokens = evidence.prompt[unended], samples.tokens[first[unended]].astype(np.float64)
        mean, scale = level.mean[prompt], np.sqrt(level.variance[prompt] + self._spread**2)
        z = quantiles_beyond((np.log(np.maximum(tokens, 1.0)) - mean) / scale, QUANTILE_LEVELS)
        total = np.exp(mean[:, None] + scale[:, None] * z)
        longest = np.maximum(self.max_tokens - tokens, 1.0)
        table = np.clip(total - tokens[:, None], 1.0, longest[:, None])
        return Forecast(rows, (np.cumsum(unended) - 1)[entry[rows]], tokens, table)

    def learn(self, samples: StepSamples) -> None:
        """Learn from a completed step. A sample that did not end counts as longer than observed."""
        evidence, _, _ = evidence_of(samples)
        prior, spread, prompts = self._levels(samples.prompt_ids), self._spread, len(samples.prompt_ids)
        level = update(prior, spread, evidence)
        mean, squared = moments(level.mean, spread, evidence)
        middle, number = level.mean[evidence.prompt], evidence.number
        # A level absorbs a part of the distances of its own samples, as with n - 1 for a sample mean.
        count = evidence.sums(1.0, prompts)
        free = count - np.minimum(count * level.variance / spread**2, count)
        self._spread_variance.add(float(squared @ number), float(free.sum()))
        self._mean.add(float(mean @ number), float(number.sum()))
        self._square.add(float((squared + (2 * mean - middle) * middle) @ number), float(number.sum()))
        distances = (level.mean - self._mean.value).tolist()
        self._before = None
        self._prompts.update(zip(samples.prompt_ids, zip(distances, level.variance.tolist(), strict=True), strict=True))

    @property
    def _spread(self) -> float:
        return math.sqrt(self._spread_variance.value)

    def _levels(self, prompt_ids: Sequence[str]) -> Levels:
        if self._before is not None and self._before[0] == prompt_ids:
            return self._before[1]
        total = self._square.value - self._mean.value**2
        between = max(total - self._spread_variance.value, LEAST_BETWEEN * total)
        new = (0.0, between - DRIFT_VARIANCE)
        distance, variance = np.array([self._prompts.get(prompt_id, new) for prompt_id in prompt_ids]).T
        levels = Levels(self._mean.value + distance, variance + DRIFT_VARIANCE)
        self._before = (prompt_ids, levels)
        return levels
