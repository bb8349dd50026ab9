"""The memory between steps: each prompt's level, and the scatter of levels and samples. Pure.

A prompt's level is kept as its distance from the run's mean, so if all
responses of a run grow longer, levels follow without a visit to every prompt. Between two visits the distance drifts by
a random amount, whose variance is learned from the errors of forecasts; the update at each visit is then an EWMA whose
weight depends on the number of visits and samples, and on the scatter of the prompt's own samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhfless.scaling.lengths.levels import Levels, squared_residuals
from rlhfless.scaling.lengths.samples import Array, BoolArray, Ints, Samples

STEPS_KEPT = 0.9
"""Weight of all earlier steps at each new one: a memory of about ten steps, some thousands of samples."""

VISITS_KEPT = 0.8
"""The same for the scatter of one prompt, at each visit."""

LEAST_BETWEEN = 0.1
"""Smallest share of the variance of all lengths that is ascribed to prompts; with 0 no level would ever be learned."""


@dataclass(slots=True)
class Mean:
    """A weighted mean with forgetting; `value` is its value before there is data, and counts as `weight` samples."""

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


PROMPT = np.dtype([("offset", float), ("variance", float), ("squares", float), ("count", float)])
"""A prompt's history in log tokens: the offset of its level from the run's mean, at the last visit, with its
variance; the sum of the squared distances of its samples from its level, and their number, with less weight for older
visits."""


class History:
    """All prompts of a run."""

    def __init__(self) -> None:
        self._row: dict[str, int] = {}
        self._prompts = np.zeros(0, PROMPT)
        """Records by row, with spare rows at the end."""
        self._spread_variance = Mean(0.4**2, 16.0)  # siblings differ by a factor of 1.5
        self._drift_variance = Mean(0.15**2, 16.0)  # between two visits, a level by a seventh

    def between_variance(self, total_variance: float) -> float:
        """Variance of the levels of prompts, given that of all lengths."""
        return max(total_variance - self._spread_variance.now, LEAST_BETWEEN * total_variance)

    def recall(self, prompt_ids: tuple[str, ...], mean: float, between: float) -> tuple[Levels, Array, BoolArray]:
        """Levels before the next visit, spread of a sample, and whether the prompt was seen: all [prompts].

        `mean` is the run's mean, `between` the variance of levels around it: the prior of a new prompt.
        """
        rows = np.array([self._row.get(prompt_id, -1) for prompt_id in prompt_ids])
        seen, known = rows >= 0, np.zeros(rows.size, PROMPT)
        known["variance"] = between
        known[seen] = self._prompts[rows[seen]]
        drifted = known["variance"] + seen * max(self._drift_variance.now, 0.0)
        pooled = self._spread_variance
        spread = np.sqrt((pooled.weight * pooled.now + known["squares"]) / (pooled.weight + known["count"]))
        return Levels(mean + known["offset"], drifted), spread, seen

    def learn(
        self,
        prompt_ids: tuple[str, ...],
        mean: float,
        before: Levels,
        after: Levels,
        spread: Array,
        seen: BoolArray,
        samples: Samples,
    ) -> None:
        """Learn the scatter of samples around levels, and of levels between visits, from a finished step; and keep its
        levels. `mean` is the run's mean including that step."""
        count = samples.sums(1.0, spread.size)
        squares = samples.sums(squared_residuals(after.mean, spread, samples), spread.size)
        free = count - np.minimum(count * after.variance / spread**2, count)  # without the part that the level took
        self._spread_variance.add(float(squares.sum()), float(free.sum()))
        # Drift is learned from prompts whose lengths are all known: with a cut-off length there is no mean to compare.
        whole = seen & (count > 0) & (samples.sums(samples.finished, spread.size) == count)
        if whole.any():
            means = samples.sums(samples.log_tokens, spread.size)[whole] / count[whole]
            off = (means - before.mean[whole]) ** 2
            explained = before.variance[whole] - self._drift_variance.now + spread[whole] ** 2 / count[whole]
            self._drift_variance.add(float((off - explained).sum()), float(whole.sum()))
        present = np.flatnonzero(count)
        kept = self._prompts_of([prompt_ids[at] for at in present.tolist()])
        self._prompts["offset"][kept], self._prompts["variance"][kept] = (
            after.mean[present] - mean,
            after.variance[present],
        )
        for name, more in (("squares", squares), ("count", free)):
            self._prompts[name][kept] = self._prompts[name][kept] * VISITS_KEPT + more[present]

    def _prompts_of(self, prompt_ids: Sequence[str]) -> Ints:
        """The rows of prompts [prompts]; new prompts get one."""
        rows = np.array([self._row.setdefault(prompt_id, len(self._row)) for prompt_id in prompt_ids], np.intp)
        if len(self._row) > self._prompts.size:
            self._prompts = np.concatenate([self._prompts, np.zeros(len(self._row), PROMPT)])
        return rows
