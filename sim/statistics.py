"""Means over seeds with confidence intervals, and ratios of two policies that shared their seeds. Pure.

The seeds of a scenario are independent samples of one workload, so the mean of a figure over n of them follows
Student's t with n - 1 degrees of freedom. For times, costs and counts, which are never negative, the logarithm of the
mean follows it to first order (the delta method): few seeds give wide limits, none below 0, and two none at all. Two
policies with the same seed have the same lengths; their ratio within each seed varies far less than either figure, so
the logarithms of the ratios are averaged: a geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
"""Level of every interval."""

LEAST_VALUES = 3
"""Fewest values of an interval. Student's t of two values spans a factor of 300,000, which carries no information."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its confidence interval; with fewer than LEAST_VALUES values the interval is the mean alone."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} ({self.low:.4g} to {self.high:.4g})"


def positive_interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values of at least 0, with limits `mean / f` and `mean * f`, above 0.

    Raises ValueError for no values, and for a negative one.
    """
    if min(values, default=0.0) < 0:
        raise ValueError(f"{min(values)} is below 0; take mean_interval")
    plain = mean_interval(values)
    if plain.mean == 0:
        return plain
    factor = math.exp((plain.high - plain.mean) / plain.mean)
    return Interval(plain.mean, plain.mean / factor, plain.mean * factor)


def share_interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent shares, with limits in [0, 1]. Raises ValueError for no values."""
    plain = mean_interval(values)
    return Interval(plain.mean, max(plain.low, 0.0), min(plain.high, 1.0))


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values of either sign. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values to average; give at least 1")
    count = len(values)
    mean = math.fsum(values) / count
    if count < LEAST_VALUES:
        return Interval(mean, mean, mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = student_quantile((1 + CONFIDENCE) / 2, count - 1) * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half)


def ratio(value: float, other: float) -> float:
    """Return value / other for values of at least 0: 1 for two zeros, infinite for a zero divisor.

    Devices without a price cost 0.
    """
    return 1.0 if value == other else value / other if other else math.inf


def ratio_interval(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the geometric mean of values[i] / others[i], from equal seeds; without limits if a ratio is 0 or infinite.

    Raises ValueError for values that are negative, or not in pairs.
    """
    if len(values) != len(others):
        raise ValueError(f"{len(values)} values and {len(others)} others; ratios need pairs")
    if min((*values, *others), default=0.0) < 0:
        raise ValueError("a ratio needs values of at least 0")
    ratios = [ratio(value, other) for value, other in zip(values, others, strict=True)]
    if ratios and (min(ratios) == 0 or max(ratios) == math.inf):
        mean = math.fsum(ratios) / len(ratios)
        return Interval(mean, mean, mean)
    logs = mean_interval([math.log(each) for each in ratios])
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high))


def quantile(values: Sequence[float], level: float) -> float:
    """Return the quantile at `level`, interpolated linearly between two values. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values to take a quantile of; give at least 1")
    ordered = sorted(values)
    place = level * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def student_quantile(level: float, freedom: int) -> float:
    """Return the quantile of Student's t with `freedom` degrees of freedom, for a level of at least one half."""
    low, high = 0.0, 1.0
    while _student_cdf(high, freedom) < level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _student_cdf(value: float, freedom: int) -> float:
    """Return the distribution function of Student's t, for a value of at least 0.

    It is the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(value / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for power in range(3 if odd else 2, freedom - 1, 2):
        term *= (power - 1) / power * cosine**2
        total += term
    between = (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total
    return (1 + between) / 2
