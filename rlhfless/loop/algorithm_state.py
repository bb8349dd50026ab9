"""The algorithm of a run as of each step: a KL coefficient may follow a target, and is then a state of the run.

The settings of a step follow from those of the step before it and its batch alone. So a step that is done again, or
learned again after a restore, has the same coefficient; a checkpoint keeps the one that follows it.
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
        """By step, of the last step that was learned from and of the next; empty before the first."""

    def _at(self, step: int) -> AlgorithmSpec:
        return self._settings.get(step, self._first)

    def at(self, step: int) -> Algorithm:
        """The algorithm with the settings of a step."""
        return algorithm_of(self._at(step))

    def learn(self, step: int, batch: PackedBatch) -> dict[str, float]:
        """Note the batch that a step learns from; return the step's figures."""
        here = self._at(step)
        kl = adaptive_kl(here)
        self._settings = {step: here, step + 1: adapt_kl(here, batch)}
        return {} if kl is None else {"kl_coefficient": kl.coefficient}

    def coefficient_after(self, step: int) -> float | None:
        """The KL coefficient of the step after `step`, if it follows a target, for a checkpoint."""
        kl = adaptive_kl(self._at(step + 1))
        return None if kl is None else kl.coefficient

    def restore(self, step: int, coefficient: float | None) -> None:
        """Go on from a checkpoint of `step` with what `coefficient_after` gave, or from the start."""
        self._settings = {} if coefficient is None else {step + 1: with_kl_coefficient(self._first, coefficient)}
