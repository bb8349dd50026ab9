"""Half-open intervals of time, as sorted lists of disjoint (start_s, end_s)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants as sorted, disjoint, non-empty intervals."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    """Sum of the lengths of disjoint intervals, in seconds."""
    return math.fsum(end - start for start, end in disjoint)


def clip(disjoint: list[Interval], start: float, end: float) -> list[Interval]:
    """The part of sorted, disjoint intervals that lies within [start, end)."""
    first = max(bisect_right(disjoint, (start, math.inf)) - 1, 0)
    inside = disjoint[first : bisect_left(disjoint, (end, -math.inf))]
    if inside and inside[0][1] <= start:
        del inside[0]
    if inside:
        inside[0] = (max(inside[0][0], start), inside[0][1])
        inside[-1] = (inside[-1][0], min(inside[-1][1], end))
    return inside
