"""A recorded run whose learner changed its size: fitted by size, and replayed with the live choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fakes.recorded_run import CHANGE_S, CORES, EVALUATE_TOKEN_S, FASTER, H100, LEARN_S, LEARN_TOKEN_S, record
from rlhfless.records import Decision, StepRecord
from rlhfless.records.traces import Trace, read_trace
from rlhfless.scaling.learner_ranks import CHANGED_IN_S, LEARNER_RANKS, GroupSize, rank_rates
from rlhfless.sim.replay.calibrate import calibrate, learning_fit
from rlhfless.sim.replay.latency_file import LatencyFile, load_latency, write_latency
from rlhfless.sim.replay.learner import SizeChanges, learner_sizes, with_learner
from rlhfless.sim.replay.recorded import changing_learner, setup_of
from rlhfless.sim.replay.replay import Replay, one_after_another, replay
from rlhfless.sim.replay.what_if import OtherDevices, run_policy
from rlhfless.sim.workloads.runtime import read_runtime
from rlhfless.spec.errors import InputError


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cores until the end of step 2, then an H100."""
    return record(tmp_path_factory.mktemp("moved"), actors=1, moves=True)


@pytest.fixture(scope="module")
def trace(moved: Path) -> Trace:
    return read_trace(moved)


@pytest.fixture(scope="module")
def latency(trace: Trace) -> LatencyFile:
    return calibrate([trace])


def with_spec(trace: Trace, **changes: dict[str, object]) -> Trace:
    return replace(trace, meta=replace(trace.meta, spec=trace.meta.spec | changes))


def test_a_size_is_in_force_from_its_decision_on(trace: Trace) -> None:
    changes = SizeChanges.of(trace)
    assert changes is not None
    (decision,) = changes.decisions
    assert (changes.first, decision.step, decision.choice) == (CORES, 2, "1 x h100")
    assert [changes.at(decision.at_s - 0.1), changes.at(decision.at_s)] == [CORES, H100]


def test_a_plan_has_the_seconds_of_the_size_that_is_asked_for(trace: Trace, latency: LatencyFile) -> None:
    """As measured, and at sizes that the run never had by the ranks of the first one."""
    learn_s = {size: with_learner(trace, latency, size).learn for size in (CORES, H100, GroupSize(1, CORES.kind))}
    assert learn_s[CORES] == latency.learn
    assert learn_s[H100] == latency.learner_sizes[str(H100)].learn
    one = learn_s[GroupSize(1, CORES.kind)]
    assert (one.fixed_s, one.token_s) == (latency.learn.fixed_s, CORES.ranks * latency.learn.token_s)


def test_each_size_has_its_own_line(trace: Trace, latency: LatencyFile) -> None:
    assert list(latency.learner_sizes) == [str(CORES), str(H100)]
    for size, slower in ((CORES, 1.0), (H100, 1 / FASTER)):
        fit = latency.learner_sizes[str(size)]
        assert fit.evaluate is not None
        assert fit.learn.fixed_s == pytest.approx(LEARN_S, rel=1e-3)
        assert fit.learn.token_s == pytest.approx(slower * LEARN_TOKEN_S, rel=1e-3)
        assert fit.evaluate.token_s == pytest.approx(slower * EVALUATE_TOKEN_S, rel=1e-3)
    first = latency.learner_sizes[str(CORES)]
    assert (latency.evaluate, latency.learn) == (first.evaluate, first.learn)
    assert learning_fit(trace).learn == first.learn, "of a run that draws nothing, too"


def test_the_file_has_the_sizes_only_where_there_are_several(latency: LatencyFile, tmp_path: Path) -> None:
    write_latency(latency, tmp_path / "moved.yaml")
    assert load_latency(tmp_path / "moved.yaml") == latency
    fixed = calibrate([read_trace(record(tmp_path / "run", actors=1))])
    assert fixed.learner_sizes == {}
    write_latency(fixed, tmp_path / "fixed.yaml")
    assert "learner_sizes" not in (tmp_path / "fixed.yaml").read_text()
    text = (tmp_path / "moved.yaml").read_text()
    (tmp_path / "wrong.yaml").write_text(text.replace("1 x h100", "one h100"))
    with pytest.raises(InputError, match="learner_sizes"):
        load_latency(tmp_path / "wrong.yaml")


def test_the_replayed_learner_moves_as_the_recorded_one(moved: Path, trace: Trace, latency: LatencyFile) -> None:
    again = replay(trace, read_runtime(moved), latency)
    assert largest_error(again, "learn") < 0.05
    assert largest_error(again, "step") < 0.02
    fixed = replace(trace, decisions=())
    mixed = replay(fixed, read_runtime(moved), calibrate([fixed]))
    assert largest_error(mixed, "learn") > 0.2, "one line for both sizes"


def test_a_replay_as_recorded_has_the_runs_changes_and_one_with_a_policy_the_live_choice(
    moved: Path, trace: Trace, latency: LatencyFile
) -> None:
    """The run is told to have changed two steps later than its contract would have it."""
    (change,) = trace.decisions
    later = replace(trace, decisions=(replace(change, step=change.step + 2),))
    as_recorded, chosen = (
        [step.predicted_s["learn"] for step in replay(later, read_runtime(moved), latency, policy).steps]
        for policy in (None, run_policy(trace, "static"))
    )
    pairs = enumerate(zip(as_recorded, chosen, strict=True), 1)
    slower = [number for number, (one, other) in pairs if one > 1.1 * other]
    assert slower == [3, 4]


def test_a_size_after_a_fault_is_that_of_the_step_that_is_done_again(trace: Trace) -> None:
    """The rank was lost in step 5; the planned change is one at the end of step 2."""
    (change,) = trace.decisions
    lost = Decision(5, change.at_s + 9, LEARNER_RANKS, str(CORES), {"before": str(H100)})
    changes = SizeChanges(CORES, (change, lost))
    assert [changes.after(step) for step in range(1, 6)] == [CORES, H100, H100, CORES, CORES]


def largest_error(again: Replay, stage: str) -> float:
    return max(abs(step.predicted_s[stage] / step.measured_s[stage] - 1) for step in again.steps)


def test_a_change_is_in_no_step_also_where_steps_overlap(trace: Trace) -> None:
    """Of three steps that are drawn 6 s early, the second ends with a change of 2 s."""
    steps = tuple(StepRecord(number, 10.0 * number - 16, 10.0 * number, {}) for number in (1, 2, 3))
    change = Decision(2, 20.0, LEARNER_RANKS, "1 x h100", {"before": "2 x cpu-core", CHANGED_IN_S: 2.0})
    found = one_after_another(replace(trace, steps=steps, decisions=(change,)))
    assert [(step.start_s, step.end_s) for step in found] == [(-6.0, 10.0), (10.0, 20.0), (22.0, 30.0)]


def test_a_replayed_fleet_has_the_devices_and_the_times_of_the_run(trace: Trace, latency: LatencyFile) -> None:
    sizes = learner_sizes(trace, latency)
    assert sizes is not None
    assert list(sizes.shapes) == [CORES, H100]
    names = [[device.name for device in of.slot_setup.allocation.devices] for of in sizes.shapes.values()]
    assert names == [["cpu-2", "cpu-3"], ["gpu-0"]]
    assert [of.parts for of in sizes.shapes.values()] == [2, 1]
    assert sizes.change_s(CORES, H100) == sizes.change_s(H100, CORES) == CHANGE_S, "the only one that was recorded"
    # The run started its learner twice, in 1 s and in CHANGE_S.
    assert sizes.change_s(CORES, CORES) == pytest.approx((1.0 + CHANGE_S) / 2)
    assert setup_of(trace, latency).learner == sizes.shapes[CORES]
    elsewhere = OtherDevices(kind="h100")
    assert changing_learner(trace, latency, elsewhere) is None, "other devices have no recorded sizes"


def test_a_size_that_was_never_there_is_the_first_one_by_ranks_and_data_sheets(
    trace: Trace, latency: LatencyFile
) -> None:
    placement = {"mode": "disaggregated", "learner_elsewhere": {"h100": 1, "h200": 2}}
    told = with_spec(trace, learner={"ranks": 2, "min_ranks": 1}, placement=placement)
    sizes = learner_sizes(told, latency)
    assert sizes is not None
    one, h200 = GroupSize(1, "cpu-core"), GroupSize(2, "h200")
    assert list(sizes.shapes) == [CORES, one, H100, h200]
    first = sizes.shapes[CORES]
    rates = rank_rates({"cpu-core", "h200"})
    for size, slower in ((one, 2.0), (h200, rates["cpu-core"] / rates["h200"])):
        shape = sizes.shapes[size]
        assert shape.fixed_s == first.fixed_s
        assert shape.learn_token_s == pytest.approx(slower * first.learn_token_s)
        assert shape.evaluate_token_s == pytest.approx(slower * first.evaluate_token_s)
    names = [[device.name for device in sizes.shapes[size].slot_setup.allocation.devices] for size in (one, h200)]
    assert names == [["cpu-2"], ["learner-h200-0", "learner-h200-1"]]


def test_a_spec_that_allows_no_other_size_any_more_has_a_learner_of_one(trace: Trace, latency: LatencyFile) -> None:
    fixed = with_spec(trace, placement={"mode": "disaggregated"})
    assert any(row.kind == LEARNER_RANKS for row in fixed.decisions)
    assert learner_sizes(fixed, latency) is None
