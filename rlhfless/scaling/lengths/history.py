"""What is remembered between steps: each prompt's level, and how much levels and samples scatter. Pure.

A prompt's level is kept as its distance from the run's mean, so a run whose responses all grow longer needs no visit
to every prompt to know it. Between two visits the distance drifts by a random amount, whose variance is learned from
how far off forecasts were; the update at each visit is then an EWMA whose weight follows from the number of visits and
samples, and from how much the prompt's own samples scatter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlhfless.scaling.lengths.hazard import Array, BoolArray
from rlhfless.scaling.lengths.levels import Levels, Samples, squared_residuals

STEPS_KEPT = 0.9
"""Weight of all earlier steps at each new one: a memory of about ten steps, some thousands of samples."""

VISITS_KEPT = 0.8
"""The same for the scatter of one prompt, at each visit."""

LEAST_BETWEEN = 0.1
"""Smallest share of the variance of all lengths that is ascribed to prompts; none would end all learning."""


@dataclass(slots=True)
class Mean:
    """A weighted mean with forgetting; `value` is what it is before there is data, as good as `weight` samples."""

    value: float
    weight: float
    _total: float = field(default=0.0, init=False)
    _count: float = field(default=0.0, init=False)

    def add(self, total: float, count: float) -> None:
        """Add `count` samples that sum to `total`."""
        self._total = self._total * STEPS_KEPT + total
        self._count = self._count * STEPS_KEPT + count

    @property
    def now(self) -> float:
        return (self.value * self.weight + self._total) / (self.weight + self._count)


@dataclass(slots=True)
class PromptHistory:
    """One prompt: log tokens, and their squares."""

    offset: float
    """Of its level from the run's mean, as it was at the last visit."""
    variance: float
    squares: float = 0.0
    """Of its samples' distances from its level, and how many there were; older visits count less."""
    count: float = 0.0


class History:
    """All prompts of a run."""

    def __init__(self) -> None:
        self._prompts: dict[str, PromptHistory] = {}
        self._spread_variance = Mean(0.4**2, 16.0)  # siblings differ by a factor of 1.5
        self._drift_variance = Mean(0.15**2, 16.0)  # between two visits, a level by a seventh

    def between_variance(self, total_variance: float) -> float:
        """Variance of the levels of prompts, given that of all lengths."""
        return max(total_variance - self._spread_variance.now, LEAST_BETWEEN * total_variance)

    def recall(self, prompt_ids: tuple[str, ...], mean: float, between: float) -> tuple[Levels, Array, BoolArray]:
        """Levels before the next visit, spread of a sample, and whether the prompt was seen: all [prompts].

        `mean` is the run's mean, `between` the variance of levels around it: all that is known of a new prompt.
        """
        new = PromptHistory(0.0, between)
        known = [self._prompts.get(prompt_id, new) for prompt_id in prompt_ids]
        seen = np.array([history is not new for history in known])
        drifted = np.array([history.variance for history in known]) + seen * max(self._drift_variance.now, 0.0)
        offset = np.array([history.offset for history in known])
        squares = np.array([history.squares for history in known])
        count = np.array([history.count for history in known])
        pooled = self._spread_variance
        spread = np.sqrt((pooled.weight * pooled.now + squares) / (pooled.weight + count))
        return Levels(mean + offset, drifted), spread, seen

    def learn_scatter(self, before: Levels, after: Levels, spread: Array, seen: BoolArray, samples: Samples) -> None:
        """Learn from a step how much samples scatter around levels, and levels from visit to visit."""
        squares, freedom = _scatter(after, spread, samples)
        self._spread_variance.add(float(squares.sum()), float(freedom.sum()))
        # Drift is told from prompts whose lengths are all known: a cut-off one has no mean to be off by.
        count = samples.present.sum(axis=1)
        whole = seen & (count > 0) & (samples.finished.sum(axis=1) == count)
        if whole.any():
            means = (samples.log_tokens * samples.present).sum(axis=1)[whole] / count[whole]
            off = (means - before.mean[whole]) ** 2
            explained = before.variance[whole] - self._drift_variance.now + spread[whole] ** 2 / count[whole]
            self._drift_variance.add(float((off - explained).sum()), float(whole.sum()))

    def remember(
        self, prompt_ids: tuple[str, ...], mean: float, after: Levels, spread: Array, samples: Samples
    ) -> None:
        """Keep the levels of a step that is over; `mean` is the run's mean with that step in it."""
        squares, freedom = _scatter(after, spread, samples)
        for row in np.flatnonzero(samples.present.any(axis=1)):
            name = prompt_ids[row]
            old = self._prompts.get(name, PromptHistory(0.0, 0.0))
            self._prompts[name] = PromptHistory(
                offset=float(after.mean[row] - mean),
                variance=float(after.variance[row]),
                squares=old.squares * VISITS_KEPT + float(squares[row]),
                count=old.count * VISITS_KEPT + float(freedom[row]),
            )


def _scatter(after: Levels, spread: Array, samples: Samples) -> tuple[Array, Array]:
    """Sum of squares around the level, and of how many free samples: each [prompts]."""
    squares: Array = squared_residuals(after.mean, spread, samples).sum(axis=1)
    count = samples.present.sum(axis=1)
    fitted = np.minimum(count * after.variance / spread**2, count)  # what the level itself took from them
    return squares, count - fitted
