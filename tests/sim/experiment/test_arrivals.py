"""Runs that come and go: each way to place them by hand, and what holds for random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.scaling.sizes import SpeedCurve
from rlhfless.scaling.sizing import Division, SizedRun
from rlhfless.sim.experiment import arrivals
from rlhfless.sim.experiment.arrivals import (
    ArrivingRun,
    ClusterSpeeds,
    compare_arrivals,
    divisions,
    elastic,
    in_parts,
    in_turns,
    poisson,
    read_arrivals,
    speeds_of,
    turns_of,
)
from rlhfless.sim.scenarios import load_scenario
from rlhfless.spec.errors import InputError
from tests.fakes.repository import SCENARIOS

FOUR = ClusterSpeeds((4,), SpeedCurve({1: 40.0, 2: 24.0, 4: 16.0}))


def test_parts_by_hand() -> None:
    """Three runs of 10 steps at 0, 100 and 110 s; one alone takes 160 s on four devices and 240 s on two."""
    runs = [ArrivingRun(0.0, 10), ArrivingRun(100.0, 10), ArrivingRun(110.0, 10)]
    alone = in_parts(FOUR, runs, (4,))
    assert alone.mean_s == pytest.approx((160 + 220 + 370) / 3), "they end at 160, 320 and 480 s"
    halves = in_parts(FOUR, runs, (2, 2))
    assert halves.mean_s == pytest.approx((240 + 240 + 370) / 3), "at 240, 340 and 480 s"
    assert halves.by_alone == pytest.approx(halves.mean_s / 160)
    assert halves.makespan_s == pytest.approx(480)
    unequal = in_parts(FOUR, runs, (2, 1, 1))
    assert unequal.mean_s == pytest.approx((240 + 400 + 400) / 3), "the first has the largest part"
    assert [parts for parts in divisions(FOUR) if len(parts) < 4] == [(4,), (2, 2), (2, 1, 1)]


def test_turns_by_hand() -> None:
    """Together, two runs do 1.25 times the steps of one alone. The second comes when the first has 6 of 10 steps left:
    at 0.625 of a step per 16 s each these take 153.6 s, and then the other's last 4 take 64 s."""
    runs = [ArrivingRun(0.0, 10), ArrivingRun(64.0, 10)]
    row = in_turns(FOUR, runs, {1: 1.0, 2: 1.25})
    assert row.mean_s == pytest.approx((64 + 153.6 + 153.6 + 64) / 2)
    queued = in_turns(FOUR, runs, {1: 1.0})
    assert queued.mean_s == pytest.approx((160 + 256) / 2), "one at a time"


def test_an_elastic_run_shrinks_at_the_end_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run comes at 40 s. The first ends its third step of 16 s at 48 s, does nothing for 5 s, and goes on
    with two devices. Alone again, it grows at the end of its step."""

    def halves(runs: list[SizedRun], nodes: tuple[int, ...]) -> Division:
        assert nodes == (4,)
        return Division({run.run_id: 4 // len(runs) for run in runs}, {})

    monkeypatch.setattr(arrivals, "divide", halves)
    row = elastic(FOUR, [ArrivingRun(0.0, 10), ArrivingRun(40.0, 2)], 5.0)
    second_s = 48 + 2 * 24  # it ends at 96 s
    steps = 2  # 53 + 2 x 24 = 101 s: the end of the step in which the second run ends
    first_s = 53 + steps * 24 + 5 + (10 - 3 - steps) * 16
    assert row.mean_s == pytest.approx((first_s + second_s - 40) / 2)
    assert row.changes == 2


@given(
    gaps=st.lists(st.floats(0, 2000), min_size=1, max_size=12),
    steps=st.integers(1, 40),
    change_s=st.sampled_from([0.0, 60.0]),
)
def test_an_elastic_cluster_does_the_work_of_every_run(gaps: list[float], steps: int, change_s: float) -> None:
    at_s, runs = 0.0, []
    for gap in gaps:
        at_s += gap
        runs.append(ArrivingRun(at_s, steps))
    row = elastic(FOUR, runs, change_s)
    assert row.by_alone >= 1 - 1e-9, "none is faster than alone on all devices"
    assert row.makespan_s >= len(runs) * steps * 10 - 1e-6, "four parts of one device do a step each 10 s"
    compared = compare_arrivals("", FOUR, runs, change_s)
    assert compared.best_static.by_alone == min(each.by_alone for each in compared.static)


def test_random_arrivals_need_the_share_of_the_throughput() -> None:
    runs = poisson(FOUR, 0.5, 4000, (10, 30), seed=1)
    assert FOUR.most_steps_per_s == 0.1, "four parts of one device"
    assert runs[0].at_s == 0
    assert sum(run.steps for run in runs) / runs[-1].at_s == pytest.approx(0.05, rel=0.05)
    assert {run.steps for run in runs} == {10, 30}
    assert runs == poisson(FOUR, 0.5, 4000, (10, 30), seed=1)


def test_arrivals_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text("at_s,steps\n60,5\n0,10\n")
    assert read_arrivals(file) == [ArrivingRun(0.0, 10), ArrivingRun(60.0, 5)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("at_s,steps\n0,0\n", "line 2: at_s is 0 and steps 0"),
        ("at_s,steps\n-1,4\n", "line 2: at_s is -1 and steps 4"),
        ("at_s,steps\nnan,4\n", "line 2: at_s is nan"),
        ("at_s,steps\nsoon,4\n", "line 2: could not convert string to float: 'soon'"),
        ("at,steps\n0,4\n", "line 2: 'at_s'"),
        ("at_s,steps\n", "has no runs"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=problem):
        read_arrivals(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_arrivals(tmp_path / "none.csv")


def test_speeds_and_turns_of_a_scenario() -> None:
    scenario = load_scenario(SCENARIOS / "gsm8k-7b-a100.yaml").model_copy(update={"steps": 2})
    speeds = speeds_of(scenario)
    assert speeds.nodes == (8,)
    assert speeds.sizes == (2, 3, 4, 6, 8), "the learner's states do not fit on one"
    seconds: list[Any] = list(speeds.curve.step_s.values())
    assert seconds == sorted(seconds, reverse=True)
    turns = turns_of(scenario, speeds)
    assert turns[1] == 1.0
    assert all(0.9 < pace < 1.1 for pace in turns.values()), "its phases leave no device idle, and switches cost"
