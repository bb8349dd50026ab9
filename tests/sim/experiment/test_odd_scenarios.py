"""Scenarios at the edges, on which policies once did worse than a static fleet for a reason that is no trade-off."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless.sim.experiment.compare import PolicyComparison, compare
from rlhfless.sim.report.verdict import unused
from rlhfless.sim.scenarios import Scenario
from rlhfless.spec.errors import InputError

LENGTHS = {"median_tokens": 800, "spread": 0.5, "persistence": 1.0}


def compared(**changes: Any) -> PolicyComparison:
    lengths = {**LENGTHS, **changes.pop("lengths", {})}
    source = {"median_prompt_tokens": 100, "source": "made up"}
    values = {
        "name": "odd",
        "cluster": {"machines": [{"kind": "h100", "devices_per_node": 8}]},
        "model": {"name": "qwen2.5-3b"},
        "workload": {"type": "lognormal", "lengths": lengths, "prompts": 128, **source},
        "prompts_per_step": 32,
        "samples_per_prompt": 8,
        "max_tokens": 1024,
        "steps": 6,
        "seeds": 1,
        "policies": [{"name": name} for name in ("static_colocated", "cost_aware", "clairvoyant")],
    }
    return compare(Scenario.model_validate(values | changes))


def test_scoring_is_up_when_all_groups_end_at_once() -> None:
    """All responses have one length, so no heartbeat sees a complete group before generation ends. Scoring was then
    started when it was wanted, and all devices waited 5 s for it in each step."""
    rows = {row.label: row for row in compared(lengths={"spread": 0.0}).rows("later")}
    for label in ("cost_aware", "clairvoyant"):
        assert rows[label].speed_up.mean > 0.97
        assert rows[label].cost_ratio.mean < 1.03


def test_one_prompt_with_one_sample_is_no_slower_than_static() -> None:
    one = compared(prompts_per_step=1, samples_per_prompt=1, steps=16)
    rows = {row.label: row for row in one.rows("all")}
    assert rows["cost_aware"].speed_up.mean > 0.97


def test_generation_runs_on_one_kind_of_device_and_the_learner_may_have_another() -> None:
    machines = [{"kind": "h200", "devices_per_node": 4}, {"kind": "l40s", "devices_per_node": 8}]
    apart, both = {"mode": "disaggregated"}, {"machines": machines}
    policies = [{"name": "static"}, {"name": "cost_aware"}]
    found = compared(cluster=both, placement=apart, policies=policies, prompts_per_step=4, steps=3)
    for runs in found.results.values():
        trace = runs[0].trace
        assert trace is not None
        kinds = {(held.function, held.device_kind) for held in trace.holdings}
        assert {("generation", "l40s"), ("learner", "h200")} <= kinds
        assert ("generation", "h200") not in kinds
    with pytest.raises(InputError, match="generation is on l40s and the learner on h200"):
        compared(cluster=both)
    with pytest.raises(ValidationError, match="generation on several kinds of devices was removed"):
        compared(cluster={"machines": [*machines, {"kind": "h100", "devices_per_node": 8}]})


def test_paid_devices_that_a_policy_never_uses_are_named() -> None:
    machines = [{"kind": "h100", "nodes": 2, "devices_per_node": 8, "tenure": "owned", "released_value": 0.5}]
    apart = {"mode": "disaggregated", "learner_devices": 1}
    policies = [{"name": "static"}, {"name": "cost_aware"}]
    sizes = {"prompts_per_step": 1, "samples_per_prompt": 1, "steps": 3}
    few = compared(cluster={"machines": machines}, placement=apart, policies=policies, **sizes)
    (run,) = few.results["cost_aware"]
    assert run.unused == {"h100": 14}, "one actor and one learner are used"
    assert unused(few) == ["cost_aware never uses 14 x h100: do not rent them"]
