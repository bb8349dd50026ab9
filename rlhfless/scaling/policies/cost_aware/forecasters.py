"""Forecasts of the response lengths of a step. Pure.

A forecast is a table of quantiles of the remaining tokens of each unfinished sample, so that planning and migration
need not know which forecaster made it: the run's own predictor, or one of the simulator's two oracles, which have
knowledge that no view holds (rlhfless.sim.experiment.bounds).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlhfless.scaling.lengths import QUANTILE_LEVELS, LengthPredictor
from rlhfless.scaling.lengths.forecast import mean_weights
from rlhfless.scaling.policy import Ints, StepView

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RemainingLengths:
    """The unfinished samples of a step, and the remaining tokens of each."""

    samples: Ints  # [rows], ascending
    levels: Floats  # [Q], ascending: ranks of the quantiles
    kind: Ints
    """[rows], ascending: row of `table`. Samples of one kind are siblings that have drawn equally many tokens."""
    table: Floats
    """[kinds, Q]: remaining tokens, ascending along Q, at least 1."""

    @property
    def known(self) -> bool:
        """Whether each length is known, so that siblings are not alike."""
        return self.levels.size == 1

    @cached_property
    def kind_means(self) -> Floats:
        """[kinds]: expected remaining tokens."""
        return np.asarray(self.table @ mean_weights(self.levels))

    @cached_property
    def means(self) -> Floats:
        """[rows]: expected remaining tokens."""
        return self.kind_means[self.kind]

    def of(self, rows: Ints) -> RemainingLengths:
        """Some of the rows."""
        return RemainingLengths(self.samples[rows], self.levels, self.kind[rows], self.table)

    def between(self, ranks: Floats) -> tuple[Ints, Ints, Floats]:
        """For `ranks` [ranks] the levels on both sides, and the share of the way between them: each [ranks]."""
        right = np.minimum(np.maximum(np.searchsorted(self.levels, ranks), 1), self.levels.size - 1)
        low, high = self.levels[right - 1], self.levels[right]
        return right - 1, right, np.minimum(np.maximum((ranks - low) / (high - low), 0.0), 1.0)

    def at(self, ranks: Floats) -> Floats:
        """[kinds, ranks] for `ranks` [ranks]: remaining tokens, linear between the levels."""
        if self.known:
            return np.repeat(self.table, ranks.size, axis=1)
        left, right, share = self.between(ranks)
        return np.asarray(self.table[:, left] * (1 - share) + self.table[:, right] * share)

    def one_each(self, rank: Floats) -> Floats:
        """[rows] for `rank` [rows]: the remaining tokens of each row at its own rank."""
        if self.known:
            return self.means
        left, right, share = self.between(rank)
        return np.asarray(self.table[self.kind, left] * (1 - share) + self.table[self.kind, right] * share)


class Forecaster(Protocol):
    """Follows the steps of one run. An oracle has nothing to learn, and overrides `look` alone."""

    def begin(self, view: StepView) -> None:  # noqa: ARG002
        """A step has begun."""
        return

    def revisits(self, view: StepView) -> bool:  # noqa: ARG002
        """Whether most prompts of the step were seen before, so that forecasts are as good as they get."""
        return True

    def look(self, view: StepView) -> RemainingLengths:
        """The remaining lengths of the step's unfinished samples, as known now."""
        ...

    def end(self, view: StepView) -> None:  # noqa: ARG002
        """All samples of the step have ended."""
        return


class PredictedLengths(Forecaster):
    """Forecasts of the run's LengthPredictor, which has learned from an earlier attempt's trace, or is new."""

    def __init__(self, predictor: LengthPredictor | None = None) -> None:
        self._predictor = predictor

    def begin(self, view: StepView) -> None:
        if self._predictor is None:
            self._predictor = LengthPredictor(view.fleet.max_tokens)
        self._predictor.drop(view.step)  # a step that failed begins anew
        self._predictor.step_began(view.step, view.prompt_ids, np.bincount(view.group))

    def revisits(self, view: StepView) -> bool:
        assert self._predictor is not None  # begin comes first
        return bool(2 * np.count_nonzero(self._predictor.seen(view.step)) > len(view.prompt_ids))

    def look(self, view: StepView) -> RemainingLengths:
        assert self._predictor is not None
        self._predictor.look(view.step, view.tokens, view.finished, view.truncated)
        forecast = self._predictor.forecast(view.step)
        return RemainingLengths(np.flatnonzero(~view.finished), QUANTILE_LEVELS, forecast.kind, forecast.table)

    def end(self, view: StepView) -> None:
        assert self._predictor is not None
        self._predictor.look(view.step, view.tokens, view.finished, view.truncated)
        self._predictor.step_ended(view.step)
