"""The rate of a learner of a mixture of experts, by how its ranks have the experts."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfless.planning.memory_plan import Question
from rlhfless.prediction.simulated import WHOLE_EXPERTS_FLOPS_PER_S, _expert_rate
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.known_models import BUILT_IN
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.spec import RunSpec

SLOW = {"expert_flops_per_s": WHOLE_EXPERTS_FLOPS_PER_S}


@pytest.mark.parametrize(
    ("model", "kind", "learner", "expected"),
    [
        ("qwen3-30b-a3b", "h100", {"ranks": 8}, {}),
        ("qwen3-30b-a3b", "h100", {"ranks": 8, "expert_parallel": 8}, {}),
        ("qwen3-30b-a3b", "h100", {"ranks": 8, "expert_parallel": 1}, SLOW),
        ("qwen3-30b-a3b", "h100", {"ranks": 5}, SLOW),  # no divisor of 128
        ("qwen3-30b-a3b", "h100", {"ranks": 1}, {}),  # nothing is gathered
        ("qwen3-30b-a3b", CPU_KIND, {"ranks": 8, "expert_parallel": 1}, {}),
        ("qwen3-8b", "h100", {"ranks": 8}, {}),
    ],
)
def test_ranks_that_gather_all_experts_are_slower(model: str, kind: str, learner: Any, expected: Any) -> None:
    values = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
    spec = RunSpec.model_validate(values | {"learner": learner})
    asked = Question(spec, ModelShape.of_config(BUILT_IN[model]), device_of(kind), 8, 1024, 0)
    assert _expert_rate(asked) == expected
