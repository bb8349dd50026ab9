"""The sizes of an elastic run: which fit, and which its contract prefers."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfless.planning.inputs import DeviceCount
from rlhfless.planning.resolve import resolve
from rlhfless.planning.sizes import fitting_sizes
from rlhfless.prediction.run_plan import Planner, planned
from rlhfless.scaling.sizes import SpeedCurve, sizes_up_to
from rlhfless.spec import CheapestSpec, RunSpec, WeightedSpec
from rlhfless.spec.errors import InputError
from rlhfless.spec.load import load_spec
from tests.fakes.repository import ROOT

PLAN_7B = ROOT / "examples" / "plans" / "7b" / "run.yaml"
PLAN_32B = ROOT / "examples" / "plans" / "32b" / "run.yaml"


def elastic(path: Any, devices: str) -> RunSpec:
    return load_spec(path, [f"placement.devices={devices}"])


def test_sizes_keep_the_devices_of_a_node_together() -> None:
    assert sizes_up_to(8, 8) == [1, 2, 3, 4, 6, 8]
    assert sizes_up_to(32, 8) == [1, 2, 3, 4, 6, 8, 16, 24, 32]
    assert sizes_up_to(5, 8) == [1, 2, 3, 4]
    assert sizes_up_to(10, 5) == [1, 2, 3, 4, 5, 10]


def test_min_is_the_fewest_devices_on_which_the_memory_plan_fits() -> None:
    sizes = [each.devices for each in fitting_sizes(elastic(PLAN_32B, "auto"), "h100", 16)]
    assert sizes == [2, 3, 4, 6, 8, 16]
    assert resolve(elastic(PLAN_32B, "auto"), DeviceCount("h100", 4)).spec.placement.devices == 4


def test_a_min_that_does_not_fit_is_refused_with_the_one_that_does() -> None:
    with pytest.raises(InputError, match=r"placement.devices.min: 1: the run does not fit on 1 x h100") as raised:
        fitting_sizes(elastic(PLAN_32B, "{min: 1}"), "h100", 8)
    assert raised.value.problems[0].hint == "set it to 2, or to auto"
    with pytest.raises(InputError, match="the run fits on no size from 1 to 1 x h100"):
        fitting_sizes(elastic(PLAN_32B, "{max: 1}"), "h100", 8)


def test_max_is_the_size_that_meets_the_contract_best() -> None:
    spec = elastic(PLAN_7B, "auto")
    asked = resolve(spec, DeviceCount("h100", 16), required=True).asked
    assert asked is not None
    planner = Planner(asked.spec)

    def sizes(contract: Any) -> dict[str, Any]:
        scaling = spec.scaling.model_copy(update={"contract": contract})
        found = planner.sizes(spec.model_copy(update={"scaling": scaling}), "h100", 16)
        assert found is not None
        return found

    fastest = sizes(WeightedSpec(time_weight=1.0))
    step_s = {each["devices"]: each["step_s"] for each in fastest["sizes"] if each["step_s"]}
    assert fastest["maximum"] == 16
    assert list(step_s.values()) == sorted(step_s.values(), reverse=True), "more devices are faster here"
    assert sizes(WeightedSpec(time_weight=0.0))["maximum"] == min(step_s), "fewer are cheaper"
    within = (step_s[4] + step_s[6]) / 2
    assert sizes(CheapestSpec(deadline_s=within))["maximum"] == 6, "the fewest that keep the deadline"


def test_the_plan_of_a_run_of_one_size_has_no_sizes() -> None:
    question = {"spec": load_spec(PLAN_7B).model_dump(mode="json"), "present": {"h100": 2}}
    assert planned(question)["sizes"] is None


def test_times_between_known_sizes() -> None:
    curve = SpeedCurve({2: 100.0, 8: 40.0})
    assert curve.at(2) == 100.0
    assert curve.at(4) == pytest.approx((100.0 * 40.0) ** 0.5), "half way on log scales"
    assert curve.at(1) == 200.0, "inverse below"
    assert curve.at(16) == 40.0, "no faster above"
    assert SpeedCurve({}).at(16) == 16**-0.75 == 0.125


def test_measured_steps_correct_the_curve() -> None:
    curve = SpeedCurve({2: 100.0, 4: 60.0, 8: 40.0}).measured({4: 90.0, 8: 50.0})
    assert curve.step_s == {2: pytest.approx(150.0), 4: 90.0, 8: 50.0}
    assert SpeedCurve({2: 100.0}).measured({}).step_s == {2: 100.0}
    assert SpeedCurve({}).measured({4: 10.0}).step_s == {4: 10.0}
