"""How much longer the rest of steps takes than at the first look, by hand."""

from __future__ import annotations

import pytest

from rlhfless.scaling.policies.cost_aware.estimators import RestTimes


def seen(*ratios: float) -> RestTimes:
    times = RestTimes(scatter=0.08, weight=2)
    for step, ratio in enumerate(ratios):
        times.begin()
        times.look(at_s=100.0 * step, rest_s=20.0)
        times.end(at_s=100.0 * step + 20.0 * ratio)
    return times


def test_the_median_is_asked_for_where_no_confidence_is() -> None:
    assert seen(1.3, 1.1, 1.2).factor(None) == pytest.approx(1.2)


def test_steps_that_end_early_allow_nothing_more() -> None:
    assert seen(0.8, 0.9).factor(None) == 1.0


def test_before_the_first_step_the_prior_scatter_counts() -> None:
    # z of 0.99 is 2.326; with one degree of freedom t = z (1 + (z^2 + 1) / 4) = 6.056, times a scatter of 0.08.
    assert seen().factor(0.99) == pytest.approx(1 + 6.056 * 0.08, abs=1e-3)
    assert seen().factor(None) == 1.0


def test_more_confidence_asks_for_more_time() -> None:
    times = seen(1.0, 1.1, 1.2)
    assert times.factor(None) < times.factor(0.9) < times.factor(0.99)


def test_a_step_that_was_never_looked_at_teaches_nothing() -> None:
    times = seen(1.2)
    times.begin()
    times.end(at_s=1e6)
    assert times.wanted
    assert times.factor(None) == pytest.approx(1.2)
