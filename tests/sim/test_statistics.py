"""Intervals worked by hand, and Student's t by its tables."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.sim.statistics import (
    Interval,
    mean_interval,
    positive_interval,
    quantile,
    ratio_interval,
    share_interval,
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


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0], [1e-9, 1e9], [0.0, 2.0], [0.0, 0.0]])
def test_fewer_than_three_seeds_have_no_interval(values: list[float]) -> None:
    """Two gave `0 to 763,862`."""
    mean = math.fsum(values) / len(values)
    alone = Interval(mean, mean, mean)
    assert mean_interval(values) == positive_interval(values) == alone
    assert max(values) > 1 or share_interval(values) == alone
    if min(values) > 0:
        ratio = ratio_interval(values, [1.0] * len(values))
        assert ratio.low == ratio.mean == ratio.high


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [0.0, 0.0, 1.0], [1.0, 1.0, 100.0], [5.0] * 4])
def test_limits_of_positive_values_are_above_zero_and_not_absurd(values: list[float]) -> None:
    """Of 1, 2 and 3 the mean is 2 +- 2.484: below 0 on the scale of the values, a factor of e^1.242 on that of
    logarithms. The largest spread that three values can have is a factor of 74."""
    interval = positive_interval(values)
    assert 0 < interval.low <= interval.mean <= interval.high < 75 * interval.mean
    if values == [1.0, 2.0, 3.0]:
        assert mean_interval(values).low < 0
        assert interval.high == pytest.approx(2 * math.exp(4.3027 / math.sqrt(3) / 2), rel=1e-4)


def test_shares_stay_shares() -> None:
    assert share_interval([0.5, 0.9, 1.0]) == Interval(pytest.approx(0.8), pytest.approx(0.1428, abs=1e-3), 1.0)
    with pytest.raises(ValueError, match="is below 0; take mean_interval"):
        positive_interval([-1.0, 1.0, 1.0])


@given(st.lists(st.floats(1.0, 1.05), min_size=8, max_size=20))
def test_on_the_scale_of_logarithms_close_values_have_the_plain_interval(values: list[float]) -> None:
    plain, logs = mean_interval(values), positive_interval(values)
    assert (logs.low, logs.high) == pytest.approx((plain.low, plain.high), rel=1e-3)


def test_ratios_in_pairs_do_not_feel_what_both_share() -> None:
    # The seeds differ a thousandfold, the ratio is always 2.
    interval = ratio_interval([2.0, 20.0, 2000.0], [1.0, 10.0, 1000.0])
    assert (interval.mean, interval.low, interval.high) == pytest.approx((2.0, 2.0, 2.0))
    assert ratio_interval([1.0, 4.0], [1.0, 1.0]).mean == pytest.approx(2.0)


def test_costs_of_nothing_are_equal() -> None:
    assert ratio_interval([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]).mean == 1.0
    assert ratio_interval([2.0, 0.0], [1.0, 0.0]).mean == pytest.approx(2**0.5)
    assert ratio_interval([2.0], [0.0]).mean == math.inf
    assert ratio_interval([0.0], [2.0]).mean == 0.0


def test_quantiles_by_hand() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.99) == pytest.approx(9.9)


def test_what_has_no_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
    with pytest.raises(ValueError, match="at least 0"):
        ratio_interval([1.0], [-1.0])
    with pytest.raises(ValueError, match="pairs"):
        ratio_interval([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)
