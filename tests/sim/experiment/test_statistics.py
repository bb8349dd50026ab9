"""Intervals worked by hand, and Student's t by its tables."""

from __future__ import annotations

import math

import pytest

from rlhfless.sim.experiment.statistics import (
    Interval,
    mean_interval,
    quantile,
    ratio_interval,
    student_quantile,
)


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423)])
def test_student_quantiles_are_those_of_the_tables(freedom: int, value: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(value, abs=5e-5)


def test_the_interval_of_three_values_by_hand() -> None:
    # Mean 2, standard deviation 1: 4.3027 x 1 / sqrt(3) to either side.
    interval = mean_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.high - 2.0 == pytest.approx(4.3027 / math.sqrt(3), abs=1e-4)
    assert 2.0 - interval.low == pytest.approx(interval.high - 2.0)
    assert mean_interval([5.0]) == Interval(5.0, 5.0, 5.0)


def test_ratios_in_pairs_do_not_feel_what_both_share() -> None:
    # The seeds differ a thousandfold, the ratio is always 2.
    interval = ratio_interval([2.0, 20.0, 2000.0], [1.0, 10.0, 1000.0])
    assert (interval.mean, interval.low, interval.high) == pytest.approx((2.0, 2.0, 2.0))
    assert ratio_interval([1.0, 4.0], [1.0, 1.0]).mean == pytest.approx(2.0)


def test_quantiles_by_hand() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.99) == pytest.approx(9.9)


def test_what_has_no_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
    with pytest.raises(ValueError, match="above 0"):
        ratio_interval([1.0], [0.0])
    with pytest.raises(ValueError, match="pairs"):
        ratio_interval([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)
