"""The shape of a distribution, learned from counts of which some are only "at least": Kaplan-Meier on a grid. Pure.

A value that was cut off is only known to be larger. So each cell of the grid counts the values that ended in it and the
values that were cut off in it, and its hazard is the share that ended of those that reached it:

    H(x) = sum over cells up to x of -log(1 - ended / reached),    P(X > x) = exp(-H(x))

A cut-off value raises `reached` alone, so it can lower no quantile. Conditioning on X > x is an addition: the quantile
at level p is where H reaches H(x) - log(1 - p). Between the edges of a cell H is a straight line (a constant hazard).

A few pseudo-observations of a normal distribution stand in before there is data, and beyond its end: past the longest
value that could be seen, the hazard is theirs.
"""

from __future__ import annotations

import math

import numpy as np

from rlhfless.scaling.lengths.kernel import Shape
from rlhfless.scaling.lengths.samples import Array


class HazardTable:
    """Counts on the grid `edges` [cells + 1], ascending. Values outside count in the outermost cells."""

    def __init__(self, edges: Array, mean: float, sd: float, pseudo_count: float) -> None:
        self._edges = edges
        survival = np.array([math.erfc((edge - mean) / (sd * math.sqrt(2))) / 2 for edge in edges])
        survival[0] = 1.0  # values below the grid count in its first cell
        self._pseudo_ended = pseudo_count * -np.diff(survival)
        self._pseudo_reached = pseudo_count * survival[:-1]
        self._ended = np.zeros(len(edges) - 1)
        self._cut_off = np.zeros(len(edges) - 1)
        self._learn()

    def add(self, ended: Array, cut_off: Array, keep: float = 1.0) -> None:
        """Count more values, after all earlier counts are multiplied by `keep` (forgetting)."""
        self._ended = self._ended * keep + self._count(ended)
        self._cut_off = self._cut_off * keep + self._count(cut_off)
        self._learn()

    def at_hazard(self, hazard: Array) -> Array:
        """Where H reaches `hazard`, any shape."""
        result: Array = np.interp(hazard, self._hazard, self._x)
        return result

    def shape(self, mean: float, sd: float) -> Shape:
        """The shape of the distribution of (x - mean) / sd."""
        return Shape((self._x - mean) / sd, self._hazard)

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation."""
        levels = (np.arange(_MOMENT_POINTS) + 0.5) / _MOMENT_POINTS
        values = self.at_hazard(-np.log1p(-levels))
        return float(values.mean()), float(values.std())

    def _count(self, values: Array) -> Array:
        cells = np.clip(np.searchsorted(self._edges, values, side="right") - 1, 0, len(self._ended) - 1)
        return np.bincount(cells, minlength=len(self._ended)).astype(np.float64)

    def _learn(self) -> None:
        reached = np.cumsum((self._ended + self._cut_off)[::-1])[::-1] + self._pseudo_reached
        share = (self._ended + self._pseudo_ended) / reached
        steps = -np.log1p(-np.minimum(share, _MOST_OF_A_CELL))
        hazard = np.concatenate([[0.0], np.cumsum(steps)])
        # The last cell's hazard continues beyond the grid, until no probability is left.
        tail = _NOTHING_LEFT * (self._edges[-1] - self._edges[-2]) / steps[-1]
        self._hazard = np.append(hazard, hazard[-1] + _NOTHING_LEFT)
        self._x = np.append(self._edges, self._edges[-1] + tail)


_MOMENT_POINTS = 1024

# exp(-1000) is 0 in floating point.
_NOTHING_LEFT = 1000.0

# The share of a cell that may end in it: keeps the hazard finite where rounding says "all of them".
_MOST_OF_A_CELL = 1 - 1e-12
