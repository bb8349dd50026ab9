"""How long the responses of a step will be, as the run's own predictor says, or one of two oracles. Pure.

A forecast is a table of quantiles of what each unfinished sample has still to draw, so that planning and migration need
not know what made it. The oracles' knowledge is handed in by the simulator; no view holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlhfless.scaling.lengths import QUANTILE_LEVELS, LengthPredictor
from rlhfless.scaling.lengths.forecast import mean_weights, runs
from rlhfless.scaling.policy import Ints, StepView

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RemainingLengths:
    """The unfinished samples of a step, and what each has still to draw."""

    samples: Ints  # [rows], ascending
    levels: Floats  # [Q], ascending: ranks of the quantiles
    kind: Ints
    """[rows], ascending: row of `table`. Rows of a kind are siblings that have drawn as many tokens."""
    table: Floats
    """[kinds, Q]: remaining tokens, ascending along Q, at least 1."""

    @property
    def known(self) -> bool:
        """Each length is known, so that siblings are not alike."""
        return self.levels.size == 1

    @cached_property
    def kind_means(self) -> Floats:
        """[kinds]: expected tokens still to draw."""
        return np.asarray(self.table @ mean_weights(self.levels))

    @cached_property
    def means(self) -> Floats:
        """[rows]: the same."""
        return self.kind_means[self.kind]

    def of(self, rows: Ints) -> RemainingLengths:
        """Some of the rows."""
        return RemainingLengths(self.samples[rows], self.levels, self.kind[rows], self.table)

    def between(self, ranks: Floats) -> tuple[Ints, Ints, Floats]:
        """For `ranks` [ranks] the levels on both sides, and how far it is from the one to the other: each [ranks]."""
        right = np.minimum(np.maximum(np.searchsorted(self.levels, ranks), 1), self.levels.size - 1)
        low, high = self.levels[right - 1], self.levels[right]
        return right - 1, right, np.minimum(np.maximum((ranks - low) / (high - low), 0.0), 1.0)

    def at(self, ranks: Floats) -> Floats:
        """[kinds, ranks] for `ranks` [ranks]: remaining tokens there, by straight lines between the levels."""
        if self.known:
            return np.repeat(self.table, ranks.size, axis=1)
        left, right, share = self.between(ranks)
        return np.asarray(self.table[:, left] * (1 - share) + self.table[:, right] * share)

    def one_each(self, rank: Floats) -> Floats:
        """[rows] for `rank` [rows]: of each row the remaining tokens at its own rank."""
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
        """What the step's unfinished samples have still to draw, by what is known now."""
        ...

    def end(self, view: StepView) -> None:  # noqa: ARG002
        """All samples of the step have ended."""
        return


class PredictedLengths(Forecaster):
    """The run's own LengthPredictor: the one of an earlier attempt's trace, or a new one."""

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


class Clairvoyant(Forecaster):
    """Knows each length. `lengths` takes a step's number, and gives the tokens of its samples [samples]."""

    def __init__(self, lengths: Callable[[int], Ints]) -> None:
        self._lengths = lengths

    def look(self, view: StepView) -> RemainingLengths:
        samples = np.flatnonzero(~view.finished)
        left = self._lengths(view.step)[samples] - view.tokens[samples]
        return RemainingLengths(samples, np.array([0.5]), np.arange(samples.size), np.maximum(left, 1.0)[:, None])


class DistributionOracle(Forecaster):
    """Knows the distribution of each prompt's lengths, which siblings are drawn from independently.

    `quantiles` takes a step's number, and gives for each prompt K lengths [groups, K], ascending, that are equally
    likely: its quantiles at (k + 0.5) / K.
    """

    def __init__(self, quantiles: Callable[[int], NDArray[np.float64]]) -> None:
        self._quantiles = quantiles

    def look(self, view: StepView) -> RemainingLengths:
        table = self._quantiles(view.step)
        samples = np.flatnonzero(~view.finished)
        kind, first = runs(view.group[samples], view.tokens[samples])
        group, tokens, count = view.group[samples[first]], view.tokens[samples[first]], table.shape[1]
        # Of the K lengths those up to the tokens drawn are ruled out; the levels are those of the rest.
        flat = table + (np.arange(len(table)) * (table.max() + 1))[:, None]
        out = np.searchsorted(flat.ravel(), tokens + group * (table.max() + 1), side="right") - group * count
        rank = out[:, None] + (count - out)[:, None] * QUANTILE_LEVELS - 0.5
        left = np.clip(np.floor(rank).astype(np.int64), 0, count - 1)
        right = np.minimum(left + 1, count - 1)
        share = np.clip(rank - left, 0.0, 1.0)
        total = table[group[:, None], left] * (1 - share) + table[group[:, None], right] * share
        return RemainingLengths(samples, QUANTILE_LEVELS, kind, np.maximum(total - tokens[:, None], 1.0))
