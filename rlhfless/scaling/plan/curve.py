"""The iteration time a(B) of an engine as straight pieces, so that draining groups can be summed in O(1).

An engine's a(B) may be any function of the batch. It is tabulated up to the largest batch and replaced by straight
lines between some of its points, as few as keep every value within `TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-3
"""Largest relative error of a piece: a tenth of the one percent by which a plan may miss the optimum."""

MOST_PIECES = 12
"""Most pieces. A staircase (batches padded to captured sizes) would need two pieces for each stair; the tolerance is
doubled until this many suffice, because each piece is one more array of the length of the step."""


@dataclass(frozen=True, slots=True)
class IterationCurve:
    """Straight pieces of a(B) for B from 1 to `knots[-1]`.

    Piece m goes from `knots[m]` to `knots[m + 1]`. Between the knots a(B) is linear; a(B) of piece m = 0 is
    `at_zero_s + slopes_s[0] B`.
    """

    knots: tuple[int, ...]
    slopes_s: tuple[float, ...]
    at_zero_s: float

    def iteration_s(self, sequences: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """a(B) by the pieces; B may be fractional and anything from 1 to the last knot."""
        batch = np.asarray(sequences, float)
        values = self.at_zero_s + self.slopes_s[0] * batch
        for knot, (before, after) in zip(self.knots[1:-1], pairwise(self.slopes_s), strict=True):
            values += (after - before) * np.maximum(batch - knot, 0.0)
        return np.asarray(values, float)


def fit_curve(table_s: Sequence[float]) -> IterationCurve:
    """The pieces of a table: `table_s[B - 1]` is a(B). A dip is levelled: more sequences never take less time.

    Raises ValueError for a table that is empty or has a value that is not positive and finite.
    """
    table = np.asarray(table_s, float)
    if table.size == 0 or not (np.isfinite(table).all() and (table > 0).all()):
        raise ValueError("iteration_s of an engine model must be positive and finite for every batch size")
    table = np.maximum.accumulate(table)
    tolerance = TOLERANCE
    while len(knots := _knots(table, tolerance)) > MOST_PIECES + 1:
        tolerance *= 2
    if len(knots) == 1:
        return IterationCurve((1, 1), (0.0,), float(table[0]))
    at = np.asarray(knots) - 1
    slopes = np.diff(table[at]) / np.diff(at)
    return IterationCurve(tuple(knots), tuple(slopes.tolist()), float(table[0] - slopes[0]))


def _knots(table: NDArray[np.float64], tolerance: float) -> list[int]:
    """Batch sizes where the pieces meet. Each piece is as long as the tolerance allows (a cone of slopes)."""
    values = table.tolist()
    knots, start = [1], 0
    while start < len(values) - 1:
        low, high, end = -np.inf, np.inf, start + 1
        for index in range(start + 1, len(values)):
            run, value = index - start, values[index]
            if low <= (value - values[start]) / run <= high:
                end = index
            low = max(low, (value * (1 - tolerance) - values[start]) / run)
            high = min(high, (value * (1 + tolerance) - values[start]) / run)
            if low > high:
                break
        knots.append(end + 1)
        start = end
    return knots
