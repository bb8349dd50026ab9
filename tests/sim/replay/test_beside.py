"""A replay under another policy beside the replay as recorded: simulated beside simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.recorded_run import record
from rlhfless.records.traces import Trace, read_trace
from rlhfless.sim.replay.beside import Beside
from rlhfless.sim.replay.replay import AS_RECORDED, Replay, ReplayedStep, replay
from rlhfless.sim.replay.what_if import OtherDevices, policy_of, run_policy
from rlhfless.sim.workloads.recorded import read_runtime

AWARE: Mapping[str, Any] = {
    "policy": {"type": "cost_aware"},
    "contract": {"type": "weighted", "time_weight": 0.6},
    "generation": {"min_actors": 1, "max_actors": 4},
}


def made(policy: str, seconds: list[float], usd: float, divided: list[tuple[int, ...]], **changes: Any) -> Replay:
    steps = tuple(ReplayedStep(step, {"step": s}, {"step": 99.0}) for step, s in enumerate(seconds, start=1))
    shares = tuple(enumerate(divided, start=1))
    return replace(Replay("r", policy, "steps 1 to 4", steps, usd, 9.9, {}, divided=shares), **changes)


BASE = made(AS_RECORDED, [2.0, 2.0], 1.0, [(5, 4), (5, 4)])


@pytest.mark.parametrize(
    ("other", "ahead", "sentence"),
    [
        (
            made("static", [2.1, 2.02], 0.98, [(5, 4), (9,)]),
            None,
            "static would take 1.03x the time at 0.98x the cost of cost_aware as recorded, both simulated; both "
            "plan the same in 1 of 2 steps.",
        ),
        (
            made("static", [2.0, 2.0], 1.0, [(5, 4), (5, 4)]),
            None,
            "static would take 1.00x the time at 1.00x the cost of cost_aware as recorded, both simulated; both "
            "plan the same in all 2 steps.",
        ),
        (
            made("cost_aware", [1.0, 1.0], 2.0, [(9,), (9,)], plans=((1, "a", "a"), (2, "a", "b"), (3, "c", "c"))),
            None,
            "cost_aware would take 0.50x the time at 2.00x the cost of cost_aware as recorded, both simulated; both "
            "plan the same in 2 of 3 steps.",
        ),
        (
            made(AS_RECORDED, [1.0, 2.0], 1.0, [(5, 4), (5, 4)]),
            1,
            "cost_aware, 1 step ahead would take 0.75x the time at 1.00x the cost of cost_aware as recorded, both "
            "simulated; both plan the same in all 2 steps.",
        ),
        (
            made(AS_RECORDED, [1.0, 1.0], 0.0, [(5, 4), (5, 4)], extrapolated_to="h200, by data sheets"),
            None,
            "cost_aware on h200, by data sheets would take 0.50x the time at 0.00x the cost of cost_aware as recorded, "
            "both simulated; both plan the same in all 2 steps.",
        ),
    ],
)
def test_the_sentence(other: Replay, ahead: int | None, sentence: str) -> None:
    assert Beside(other, BASE, "cost_aware", ahead).sentence == sentence


def test_a_run_that_cost_nothing_costs_the_same() -> None:
    free = replace(BASE, predicted_usd=0.0)
    assert Beside(free, free, "static").costs == 1.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("aware"), actors=4, prompts=40, median_tokens=110.0, scaling=AWARE)


def beside(trace: Trace, folder: Path, policy: str | None, other: OtherDevices) -> Beside:
    drawn = read_runtime(folder)
    chosen = None if policy is None else run_policy(trace, policy)
    return Beside(replay(trace, drawn, None, chosen, other), replay(trace, drawn), policy_of(trace))


def test_the_same_policy_is_the_run_and_another_is_not(run: Path) -> None:
    """All actors in every step are faster and cost more than what the contract chose."""
    trace = read_trace(run)
    own = beside(trace, run, "cost_aware", OtherDevices())
    assert own.times == pytest.approx(1.0, abs=0.05)
    assert own.same[0] >= own.same[1] - 1
    static = beside(trace, run, "static", OtherDevices())
    assert static.times < 1.01
    assert static.same[0] < static.same[1] == len(static.base.steps)
    assert "of cost_aware as recorded" in static.sentence


def test_a_run_whose_spec_names_no_policy(run: Path) -> None:
    trace = read_trace(run)
    assert policy_of(replace(trace, meta=replace(trace.meta, spec={}))) == "the run"
