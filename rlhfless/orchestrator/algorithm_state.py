"""The algorithm of a run at each step: a KL coefficient that follows a target is state of the run.

A step's settings depend only on the previous step's settings and batch. A step that is repeated, or learned again after
a restore, therefore has the same coefficient. A checkpoint saves the coefficient of the next step.
"""

from __future__ import annotations

from rlhfless.algorithms.base import Algorithm, algorithm_of
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.kl import adapt_kl, adaptive_kl, with_kl_coefficient
from rlhfless.spec import AlgorithmSpec


class AlgorithmState:
    """The settings of the steps around the current one."""

    def __init__(self, settings: AlgorithmSpec) -> None:
        self._first = settings
        self._settings: dict[int, AlgorithmSpec] = {}
        """By step, for the last learned step and the next; empty before the first."""

    def _at(self, step: int) -> AlgorithmSpec:
        return self._settings.get(step, self._first)

    def at(self, step: int) -> Algorithm:
        """Build the algorithm with the settings of a step."""
        return algorithm_of(self._at(step))

    def learn(self, step: int, batch: PackedBatch) -> dict[str, float]:
        """Adapt the next step's settings to the batch of this one; return this step's metrics."""
        here = self._at(step)
        kl = adaptive_kl(here)
        self._settings = {step: here, step + 1: adapt_kl(here, batch)}
        return {} if kl is None else {"kl_coefficient": kl.coefficient}

    def coefficient_after(self, step: int) -> float | None:
        """Return the KL coefficient of the step after `step` for a checkpoint, or None if it follows no target."""
        kl = adaptive_kl(self._at(step + 1))
        return None if kl is None else kl.coefficient

    def restore(self, step: int, coefficient: float | None) -> None:
        """Resume from a checkpoint of `step` with what `coefficient_after` returned, or from the start."""
        self._settings = {} if coefficient is None else {step + 1: with_kl_coefficient(self._first, coefficient)}
