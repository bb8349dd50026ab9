"""`placement.devices`: a number, auto, or a range, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless.spec import PlacementSpec, RunSpec
from rlhfless.spec.explain import explain
from rlhfless.spec.fleet import DeviceRange


@pytest.mark.parametrize(
    ("devices", "count", "sizes"),
    [
        (None, None, None),
        (4, 4, None),
        ("auto", None, DeviceRange()),
        ({"min": 2, "max": 8}, None, DeviceRange(min=2, max=8)),
        ({"max": 8}, None, DeviceRange(max=8)),
        ({}, None, DeviceRange()),
    ],
)
def test_a_number_is_one_size_and_a_range_several(devices: Any, count: int | None, sizes: DeviceRange | None) -> None:
    placement = PlacementSpec(devices=devices)
    assert (placement.device_count, placement.size_range) == (count, sizes)
    assert PlacementSpec.model_validate(placement.model_dump(mode="json")) == placement


@pytest.mark.parametrize(
    ("devices", "where", "what", "hint"),
    [
        ({"min": 1, "mx": 4}, "placement.devices.mx", "unknown key", "did you mean `max`? Valid keys here: min, max"),
        ({"min": 5, "max": 4}, "placement.devices", "min (5) is above max (4); swap them", ""),
        ({"min": 0}, "placement.devices.min", "0: should be greater than or equal to 1, or should be 'auto'", ""),
        ("most", "placement.devices", "'most': should be a number of devices, auto, or a range {min, max}", ""),
        (True, "placement.devices", "True: should be a number of devices, auto, or a range {min, max}", ""),
        (0, "placement.devices", "0: should be greater than or equal to 1", ""),
        (1.5, "placement.devices", "1.5: should be a valid integer", ""),
    ],
)
def test_one_problem_with_field_value_and_hint(devices: Any, where: str, what: str, hint: str) -> None:
    values = {
        "name": "run",
        "model": {"path": "model"},
        "prompts": {"path": "prompts.jsonl"},
        "rewards": [{"type": "exact_match"}],
        "steps": 1,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "placement": {"devices": devices},
    }
    with pytest.raises(ValidationError) as raised:
        RunSpec.model_validate(values)
    problems = explain(raised.value, RunSpec, {}, values)
    assert [problem.where for problem in problems] == [where]
    assert problems[0].what.startswith(what)
    assert problems[0].hint == hint


def test_runs_that_share_devices_have_one_size() -> None:
    with pytest.raises(ValidationError, match="devices is a range, but tenants is 2"):
        PlacementSpec(devices="auto", tenants=2)


def test_a_run_alone_takes_what_is_there_within_its_range() -> None:
    assert DeviceRange().within(8) == 8
    assert DeviceRange(min=2, max=4).within(8) == 4
    assert DeviceRange(min=2, max=4).within(3) == 3
    assert DeviceRange(min=2, max=4).within(1) == 2, "it does not start below its min"
