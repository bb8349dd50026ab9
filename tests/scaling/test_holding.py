"""Keep warm or release: the break-even time, and the figures it is made of."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.records import FunctionName, Holding, Invocation, ReplicaState, Work
from rlhfless.scaling.holding import HoldDecision, HoldFigures, decide_hold, hold_figures
from rlhfless.spec import Hold

SCORING = FunctionName.SCORING


def decide(
    hold: Hold, gap_s: float | None, cold_s: float | None, idle_s: float = 0.0, waiting: float = 0.0
) -> HoldDecision:
    return decide_hold(
        SCORING,
        hold,
        HoldFigures(gap_s, cold_s),
        idle_s=idle_s,
        device_usd_per_hour=2.0,
        waiting_usd_per_hour=waiting,
    )


@pytest.mark.parametrize(
    ("gap_s", "waiting", "keep"),
    [
        (19.0, 0.0, True),  # a gap of 19 s costs less than a cold start of 20 s
        (21.0, 0.0, False),
        (59.0, 4.0, True),  # others at 4 $/h wait: a cold start is worth 20 * (2 + 4) / 2 = 60 s
        (61.0, 4.0, False),
    ],
)
def test_auto_takes_the_cheaper_side_of_the_mean(gap_s: float, waiting: float, keep: bool) -> None:
    decision = decide("auto", gap_s, cold_s=20.0, waiting=waiting)
    assert decision.keep is keep
    assert decision.inputs["break_even_s"] == pytest.approx(20 * (2 + waiting) / 2)
    assert decision.inputs["gap_usd"] == pytest.approx(gap_s * 2 / 3600)
    assert decision.inputs["cold_start_usd"] == pytest.approx(20 * (2 + waiting) / 3600)


def test_without_a_gap_it_is_kept_until_break_even() -> None:
    assert decide("auto", None, 20.0, idle_s=19.0).release_after_s == 20.0
    assert not decide("auto", None, 20.0, idle_s=20.0).keep


def test_short_gaps_do_not_keep_it_beyond_break_even() -> None:
    assert decide("auto", 5.0, 20.0, idle_s=19.0).keep
    assert not decide("auto", 5.0, 20.0, idle_s=21.0).keep


def test_without_a_cold_start_there_is_nothing_to_weigh() -> None:
    assert decide("auto", 1e6, None).release_after_s == math.inf


@pytest.mark.parametrize("gap_s", [None, 0.0, 1e9])
def test_the_spec_has_the_last_word(gap_s: float | None) -> None:
    assert decide("always", gap_s, 1.0, idle_s=1e9).keep
    assert not decide("never", gap_s, 1e9).keep


def test_a_free_device_is_kept() -> None:
    decision = decide_hold(
        SCORING, "auto", HoldFigures(1e9, 1.0), idle_s=0, device_usd_per_hour=0, waiting_usd_per_hour=1
    )
    assert decision.keep


def test_the_record_has_all_it_was_decided_from() -> None:
    record = decide("auto", 10.0, 20.0, idle_s=1.0).record(step=3, at_s=77.0)
    assert (record.step, record.at_s, record.kind, record.choice) == (3, 77.0, "hold", "scoring")
    assert {"mean_gap_s", "mean_cold_start_s", "break_even_s", "idle_s", "reason", "hold"} <= set(record.inputs)
    assert record.inputs["release_after_s"] == 20.0
    assert decide("never", 10.0, 20.0).record(3, 77.0).kind == "release"


@given(
    gap_s=st.floats(0, 1e4),
    cold_s=st.floats(0.1, 1e4),
    waiting=st.floats(0, 100),
)
def test_the_break_even_rule_costs_at_most_twice_what_foresight_would(
    gap_s: float, cold_s: float, waiting: float
) -> None:
    limit_s = decide("auto", None, cold_s, waiting=waiting).release_after_s
    start_usd = cold_s * (2.0 + waiting)
    paid = gap_s * 2.0 if gap_s < limit_s else limit_s * 2.0 + start_usd
    foresight = min(gap_s * 2.0, start_usd)
    assert paid <= 2 * foresight * (1 + 1e-9)


def start(incarnation: str, start_s: float, end_s: float, function: FunctionName = SCORING) -> Holding:
    return Holding(function, "s", incarnation, "cpu-0", "cpu-core", 1.0, ReplicaState.STARTING, start_s, end_s)


def score(step: int, start_s: float, end_s: float, function: FunctionName = SCORING) -> Invocation:
    return Invocation(function, "s", "a", Work.SCORE, step, start_s, end_s)


def test_figures_from_the_ledger() -> None:
    calls = [
        score(1, 10, 12),
        score(1, 13, 15),  # one use: 10 to 15
        score(2, 25, 30),  # kept warm: a gap of 10
        score(3, 60, 61),  # released, wanted again at 50: a gap of 20, not 30
        score(4, 0, 99, FunctionName.GENERATION),
    ]
    starts = [start("a", 0, 8), start("b", 50, 56), start("x", 0, 99, FunctionName.GENERATION)]
    assert hold_figures(SCORING, starts, calls) == HoldFigures(mean_gap_s=15.0, mean_cold_start_s=7.0)


def test_no_figures_from_an_empty_ledger() -> None:
    assert hold_figures(SCORING, [], []) == HoldFigures(None, None)
    assert hold_figures(SCORING, [], [score(1, 0, 1)]).mean_gap_s is None
