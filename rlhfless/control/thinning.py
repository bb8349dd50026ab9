"""Fewer points of a long curve, which look the same: a chart has some hundred pixels. Pure.

The first and the last point stay. What is between them is cut into bins of equal width, and of each bin the lowest and
the highest point stay: a spike of a single step is seen in a run of any length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FEWEST = 4
"""First, last, and one bin with its two extremes."""


def kept(values: npt.NDArray[np.float64], points: int) -> npt.NDArray[np.intp]:
    """Places of the points that stay, in order: at most `points` (at least FEWEST). NaN stays only where a bin has
    nothing else."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    bins = (points - 2) // 2
    edges = np.linspace(1, count - 1, bins + 1).astype(np.intp)
    width = int(np.max(np.diff(edges)))
    places = edges[:-1, None] + np.arange(width)  # [bins, width]
    before_edge = places < edges[1:, None]
    places = np.where(before_edge, places, edges[:-1, None])
    binned = values[places]
    lowest = np.argmin(np.where(np.isnan(binned), np.inf, binned), axis=1)
    highest = np.argmax(np.where(np.isnan(binned), -np.inf, binned), axis=1)
    row = np.arange(bins)
    return np.unique(np.concatenate([[0, count - 1], places[row, lowest], places[row, highest]]))
