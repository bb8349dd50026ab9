"""Forecasts of the response lengths of a step, and the lengths used to plan it. Pure.

A forecast is a table of quantiles of the remaining tokens of each unfinished sample. It comes from the run's own
predictor or from one of the simulator's oracles (rlhfless.sim.experiment.run).

A plan takes one length per sample. Mean lengths would miss long samples, which determine when an actor ends; a high
quantile of each would treat all samples as long. Instead, each sample gets a length at its own rank, and the ranks of
any stretch of the list are spread evenly over 0 to 1 (van der Corput's sequence). A group of n samples then looks like
a typical draw of n, including its long ones, and the plan's closed form applies. The list is sorted by the prompts'
means; siblings are not distinguished (`typical_responses`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from rlhfless.scaling.lengths import QUANTILE_LEVELS, LengthPredictor, StepSamples
from rlhfless.scaling.lengths.levels import mean_weights
from rlhfless.scaling.policies.cost_aware.group_times import Floats, Responses, responses
from rlhfless.scaling.policies.fleet import samples_by_prompt
from rlhfless.scaling.policy import Ints, StepView

POINTS = 48  # at which probabilities are computed: for 8,192 tokens they differ by a fifth, and are linear between
LEAST_CHANCE = 1e-12  # Keeps logarithms finite
EVEN = 0.5  # confidence of a median
SIMILAR_MEAN = 1.25
"""Prompts whose forecasts differ by less than this factor may be swapped in the sorted list so that common prefixes
are adjacent: forecasts of single prompts have larger errors."""


@dataclass(frozen=True)
class RemainingLengths:
    """The unfinished samples of a step, and the distribution of each sample's remaining tokens."""

    samples: Ints  # [rows], ascending
    levels: Floats  # [Q], ascending: ranks of the quantiles
    kind: Ints
    """[rows], ascending: row of `table`. Siblings with the same number of tokens so far are of one kind."""
    table: Floats  # [kinds, Q]: remaining tokens, ascending along Q, at least 1

    @property
    def known(self) -> bool:
        """Return whether each length is known exactly, so that siblings differ."""
        return self.levels.size == 1

    @cached_property
    def means(self) -> Floats:
        """Return the expected remaining tokens [rows]."""
        return np.asarray((self.table @ mean_weights(self.levels))[self.kind])

    def between(self, ranks: Floats) -> tuple[Ints, Ints, Floats]:
        """Return, for `ranks` [ranks], the levels on both sides and the fraction of the way between, each [ranks]."""
        right = np.minimum(np.maximum(np.searchsorted(self.levels, ranks), 1), self.levels.size - 1)
        low, high = self.levels[right - 1], self.levels[right]
        return right - 1, right, np.minimum(np.maximum((ranks - low) / (high - low), 0.0), 1.0)

    def at(self, ranks: Floats) -> Floats:
        """Return the remaining tokens [kinds, ranks] at `ranks` [ranks], linear between the levels."""
        if self.known:
            return np.repeat(self.table, ranks.size, axis=1)
        left, right, share = self.between(ranks)
        return np.asarray(self.table[:, left] * (1 - share) + self.table[:, right] * share)

    def one_each(self, rank: Floats) -> Floats:
        """Return the remaining tokens [rows], each row at its own `rank` [rows]."""
        if self.known:
            return self.means
        left, right, share = self.between(rank)
        return np.asarray(self.table[self.kind, left] * (1 - share) + self.table[self.kind, right] * share)

    def typical_draw(self, order: Ints) -> Floats:
        """Return the remaining tokens [rows] at a different rank per row, so that any stretch of `order` looks like
        a draw."""
        ranks = np.empty(order.size)
        ranks[order] = even_ranks(order.size)
        return self.one_each(ranks)

    def grid(self) -> Floats:
        """Return tokens [T] from 0 to the longest quantile, with increasing distance between points."""
        return np.append(0.0, np.geomspace(1.0, max(float(self.table[:, -1].max(initial=1.0)), 2.0), POINTS))

    def unended(self, at: Floats) -> Floats:
        """Return -log of the probability [kinds, T] that a sample of a kind has ended by `at` [T] tokens.

        Below the lowest quantile the probability falls linearly to 0.
        """
        tables = np.concatenate([np.zeros((len(self.table), 1)), self.table], axis=1)
        levels = np.append(0.0, self.levels) if not self.known else np.array([0.0, 1.0])
        right = np.clip((tables[:, :, None] <= at).sum(axis=1), 1, levels.size - 1)
        low, high = (np.take_along_axis(tables, index, axis=1) for index in (right - 1, right))
        share = (high <= at) if self.known else np.clip((at - low) / np.maximum(high - low, 1e-9), 0.0, 1.0)
        ended = levels[right - 1] + share * (levels[right] - levels[right - 1])
        ended[at >= self.table[:, -1:]] = 1.0
        return np.asarray(-np.log(np.maximum(ended, LEAST_CHANCE)))

    @staticmethod
    def crossing(grid: Floats, unended: Floats, confidence: float) -> float:
        """Return the tokens by which all samples have ended with this probability, given their summed `unended` [T]."""
        return float(np.interp(math.log(confidence), -unended, grid))


def even_ranks(count: int) -> Floats:
    """Return van der Corput's sequence [count], at the midpoints of its intervals of 0 to 1."""
    bits = max(int(count - 1).bit_length(), 1)
    index, ranks = np.arange(count), np.zeros(count)
    for bit in range(bits):
        ranks += (index >> bit & 1) * 0.5 ** (bit + 1)
    return ranks + 0.5 ** (bits + 1)


class Forecaster(Protocol):
    """Interface of length forecasts over the steps of a run. An oracle overrides only `look`, since it need not
    learn."""

    def begin(self, view: StepView) -> None:  # noqa: ARG002
        """Note that a step has started."""
        return

    def revisits(self, view: StepView) -> bool:  # noqa: ARG002
        """Return whether most prompts of the step were seen before, so that forecasts are at their best."""
        return True

    def look(self, view: StepView) -> RemainingLengths:
        """Return the remaining lengths of the step's unfinished samples, as known now."""
        ...

    def end(self, view: StepView) -> None:  # noqa: ARG002
        """Learn from the step's samples, which have all ended."""
        return


class PredictedLengths(Forecaster):
    """Forecasts of the run's LengthPredictor, either new or trained on an earlier attempt's trace."""

    def __init__(self, predictor: LengthPredictor | None = None) -> None:
        self._predictor = predictor

    def begin(self, view: StepView) -> None:
        if self._predictor is None:
            self._predictor = LengthPredictor(view.fleet.max_tokens)

    def revisits(self, view: StepView) -> bool:
        assert self._predictor is not None  # begin comes first
        return bool(2 * np.count_nonzero(self._predictor.seen(view.prompt_ids)) > len(view.prompt_ids))

    def look(self, view: StepView) -> RemainingLengths:
        assert self._predictor is not None
        forecast = self._predictor.forecast(_samples_of(view))
        return RemainingLengths(forecast.rows, QUANTILE_LEVELS, forecast.kind, forecast.table)

    def end(self, view: StepView) -> None:
        assert self._predictor is not None
        self._predictor.learn(_samples_of(view))


def _samples_of(view: StepView) -> StepSamples:
    return StepSamples(view.prompt_ids, view.group, view.tokens, view.finished, view.truncated)


def typical_responses(lengths: RemainingLengths, view: StepView) -> Responses:
    """Return the step as the plan sees it. All samples of the step must be in `lengths`."""
    if lengths.known:  # then it is also known which sibling is long
        return responses(lengths.means, view.group, view.prompt_tokens, view.prefixes)
    by_mean = _by_mean(view, np.bincount(view.group, lengths.means) / np.bincount(view.group))
    order = samples_by_prompt(by_mean, view.group)
    step = responses(lengths.typical_draw(order), view.group, view.prompt_tokens, view.prefixes)
    return replace(step, order=order, longest=_longest(lengths, order))


def _longest(lengths: RemainingLengths, order: Ints) -> Floats:
    """Return the length [rows] of a group that ends at each row of `order` [rows], as a median bound.

    P(all groups end within theirs) = 0.5. Each sample may exceed it with the same small probability, so a group's
    length depends on its samples, not on their number. No group is longer than all samples together.
    """
    each = lengths.at(np.array([EVEN ** (1 / order.size)]))[:, 0]
    grid = lengths.grid()
    together = lengths.crossing(grid, lengths.unended(grid)[lengths.kind].sum(axis=0), EVEN)
    return np.asarray(np.minimum(np.sort(each[lengths.kind[order]]), together))


def _by_mean(view: StepView, means: Floats) -> Ints:
    """Return the prompts [prompts], ascending by `means` [prompts].

    Among similar ones, prompts with a common prefix are adjacent, so that an actor's group computes few prefixes.
    """
    if view.prefixes is None or not len(view.prefixes):
        return np.argsort(means, kind="stable")
    level = np.floor(np.log(np.maximum(means, 1.0)) / math.log(SIMILAR_MEAN))
    order: Ints = np.lexsort((means, view.prefixes.ranks, level))
    return order
