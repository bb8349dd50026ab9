"""The check `rollouts`, on numbers by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.records import WeightVersion
from rlhfless.weights.errors import WeightCheckFailed
from rlhfless.weights.monitor import FIRST_STEPS, PATIENCE_STEPS, RISE, RolloutMonitor

VERSION = WeightVersion("run", 1, 3, "ab" * 16)


def observed(monitor: RolloutMonitor, *differences_nats: float) -> list[str | None]:
    return [monitor.observe(VERSION, nats) for nats in differences_nats]


def test_one_jump_warns_and_the_second_in_a_row_stops() -> None:
    """Honest steps have 0.005, one with the weights of the step before 0.1. The limit is 4 x 0.005."""
    monitor = RolloutMonitor("bfloat16")
    assert observed(monitor, 0.005, 0.006, 0.005) == [None] * 3
    assert monitor.limit_nats() == pytest.approx(0.02)
    (warning,) = observed(monitor, 0.1)
    assert warning is not None
    assert "differ by 0.1 nats on average (limit 0.02)" in warning
    with pytest.raises(WeightCheckFailed, match="2 steps in a row") as failed:
        observed(monitor, 0.09)
    assert failed.value.check == "rollouts"
    assert failed.value.version == VERSION


def test_a_suspicious_step_is_not_what_the_next_is_judged_by() -> None:
    monitor = RolloutMonitor("bfloat16")
    observed(monitor, 0.005, 0.005, 0.005)
    for _ in range(20):  # every other step, for ever: each is warned of
        assert observed(monitor, 0.1)[0] is not None
        assert observed(monitor, 0.005) == [None]
    assert monitor.limit_nats() == pytest.approx(0.02)


def test_the_first_steps_are_not_judged_and_neither_is_rounding() -> None:
    assert observed(RolloutMonitor("bfloat16"), 9.0, 0.1, 3.0) == [None] * FIRST_STEPS
    # A policy that hardly hesitates: 1e-6, then 3e-3, which is below four times the rounding of bfloat16, 1e-3.
    assert observed(RolloutMonitor("bfloat16"), 1e-6, 1e-6, 1e-6, 3e-3, 3e-3) == [None] * 5


def test_a_step_is_judged_by_earlier_steps_of_its_lag() -> None:
    """One version behind, an update is in the difference: 0.1 where honest steps without a lag have 0.005."""
    monitor = RolloutMonitor("bfloat16")
    for _ in range(4):
        assert monitor.observe(VERSION, 0.005) is None
        assert monitor.observe(VERSION, 0.1, lag=1) is None
    assert (monitor.limit_nats(), monitor.limit_nats(1), monitor.limit_nats(2)) == (
        pytest.approx(0.02),
        pytest.approx(0.4),
        None,
    )
    warning = monitor.observe(VERSION, 0.5, lag=1)
    assert warning is not None
    assert "differ by 0.5 nats on average, drawn 1 versions behind (limit 0.4)" in warning
    with pytest.raises(WeightCheckFailed, match="2 steps in a row"):
        monitor.observe(VERSION, 0.1)


def test_a_limit_that_was_given_holds_from_the_first_step() -> None:
    monitor = RolloutMonitor("float32", limit_nats=0.5)
    assert observed(monitor, 0.5, 0.1) == [None, None]
    assert observed(monitor, 0.6)[0] is not None
    with pytest.raises(WeightCheckFailed):
        observed(monitor, 0.6)


@given(st.floats(1e-4, 0.1), st.lists(st.floats(0.55, 1.45), min_size=1, max_size=200))
def test_differences_that_scatter_by_less_than_half_never_alarm(level_nats: float, factors: list[float]) -> None:
    """1.45 / 0.55 is less than RISE, whatever the median is."""
    assert RISE > 1.45 / 0.55
    assert PATIENCE_STEPS > 1
    assert set(observed(RolloutMonitor("bfloat16"), *(level_nats * factor for factor in factors))) == {None}


def test_a_slow_drift_never_alarms() -> None:
    """Ten times in 200 steps: 1.012 a step, 1.27 over the 20 steps that are remembered."""
    assert set(observed(RolloutMonitor("bfloat16"), *(0.005 * 1.012**step for step in range(200)))) == {None}


def test_a_difference_that_is_not_a_number_is_suspicious() -> None:
    monitor = RolloutMonitor("bfloat16")
    observed(monitor, 0.005, 0.005, 0.005)
    assert observed(monitor, float("nan"))[0] is not None
