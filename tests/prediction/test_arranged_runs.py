"""Several runs of a spec on the same devices: what the plan compares, and when shared engines pay."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfless.planning.resolve import question_of
from rlhfless.prediction.run_plan import Planner
from rlhfless.spec import RunSpec

SPEC: dict[str, Any] = {
    "model": {"path": "Qwen/Qwen2.5-7B-Instruct", "lora": {"rank": 32, "alpha": 32}},
    "prompts": {"path": "p.jsonl"},
    "rewards": [{"type": "math"}],
    "generation": {"lora": "adapter"},
}


def gains(prompts: int, runs: int, devices: int, **changes: Any) -> dict[str, float]:
    """Return how much sooner all runs end than one after the other, by arrangement."""
    spec = RunSpec.model_validate(SPEC | {"prompts_per_step": prompts, "samples_per_prompt": 8} | changes)
    asked = question_of(spec, "h100", devices)
    _, ways = Planner(asked.spec).arranged(asked, runs)
    return {way.name: ways[0].makespan_s / way.makespan_s for way in ways}


def best(found: dict[str, float], *, shared: bool) -> float:
    return max(gain for name, gain in found.items() if ("by adapters" in name) is shared)


def test_small_runs_that_outnumber_the_devices_gain_from_shared_engines_and_large_ones_do_not() -> None:
    small = gains(prompts=8, runs=8, devices=2)
    assert best(small, shared=True) > 1.1 * best(small, shared=False)
    large = gains(prompts=128, runs=2, devices=2)
    assert best(large, shared=True) < best(large, shared=False)


def test_a_run_of_all_weights_has_no_shared_engines() -> None:
    model = {"path": "Qwen/Qwen2.5-0.5B-Instruct"}
    found = gains(8, 2, 2, model=model, generation={})
    assert not any("by adapters" in name for name in found)


def test_a_schedule_that_overlaps_is_compared_in_step() -> None:
    found = gains(8, 2, 2, schedule={"type": "one_step_off"})
    assert found == pytest.approx(gains(8, 2, 2))
