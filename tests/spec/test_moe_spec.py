"""Keys of mixtures of experts: what cannot work is refused, with the key, the value and what to set."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from transformers import CONFIG_MAPPING

from rlhfless.planning.resolve import device_problems, resolve_for_kind
from rlhfless.scaling.latency.shape import DISPATCHED, ModelShape
from rlhfless.spec import LearnerSpec, RunSpec
from rlhfless.spec.errors import SpecError
from rlhfless.spec.load import load_spec
from rlhfless.spec.removed import FOREIGN

SMALL: dict[str, Any] = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
DENSE = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 97, "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
OWN_ENGINE = "rlhfless.functions.generation.vllm.adapter:VllmEngine"
REPLAY = {"algorithm": {"type": "grpo", "router_replay": "engine"}}


def spec(**changes: Any) -> RunSpec:
    return RunSpec.model_validate(SMALL | changes)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"generation": {"speculation": {"method": "suffix"}}}, ["method is suffix", "older model runner", "recorded"]),
        ({"generation": {"speculation": {"method": "auto"}}}, ["method is auto", "older model runner"]),
        (
            {"scaling": {"prefill": {"max_actors": 1, "kv_connector": "nixl"}}},
            ["kv_connector is nixl", "vLLM refuses", "max_actors to 0"],
        ),
        (
            {"generation": {"engine": {"extra": {"pipeline_parallel_size": 2}}}},
            ["extra has pipeline_parallel_size", "leave it out"],
        ),
        (
            {"generation": {"engine": {"extra": {"enable_prefix_caching": False}}}},
            ["extra has enable_prefix_caching", "leave it out"],
        ),
        ({"generation": {"engine": {"type": OWN_ENGINE}}}, [f"type is {OWN_ENGINE}", "records no routes"]),
        ({"learner": {"compile": True}}, ["learner.compile is true", "one of them"]),
    ],
)
def test_combinations_that_have_no_routes_are_refused(changes: dict[str, Any], parts: list[str]) -> None:
    spec(**changes)
    with pytest.raises(ValidationError) as caught:
        spec(**REPLAY, **changes)
    assert "algorithm.router_replay is engine" in str(caught.value)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_recorded_routes_go_with_any_engine() -> None:
    recorded = {"algorithm": {"type": "grpo", "router_replay": "recorded"}}
    assert spec(**recorded, generation={"speculation": {"method": "suffix"}}).router_replay == "recorded"
    assert not spec(**recorded).replays_engine_routes
    assert spec(**REPLAY).replays_engine_routes


@pytest.mark.parametrize("key", FOREIGN)
def test_an_auxiliary_loss_is_refused_with_the_reason(key: str, tmp_path: Any) -> None:
    section, _, name = key.rpartition(".")
    lines = f"{name}: 0.001" if not section else f"{section}: {{path: m, {name}: 0.001}}"
    path = tmp_path / "run.yaml"
    rest = "" if section == "model" else "model: {path: m}\n"
    path.write_text(f"{rest}prompts: {{path: p}}\nrewards: [{{type: exact_match}}]\n{lines}\n")
    with pytest.raises(SpecError, match="competes with the reward"):
        load_spec(path)


@pytest.mark.parametrize(
    ("ranks", "setting", "experts", "expected"),
    [
        (1, "auto", 12, 1),
        (2, "auto", 12, 2),
        (4, "auto", 12, 4),
        (16, "auto", 128, 8),  # a node
        (24, "auto", 128, 8),
        (6, "auto", 128, 2),
        (5, "auto", 128, 1),
        (8, "auto", 0, 1),  # no experts that can be divided
        (8, 4, 12, 4),
        (8, 16, 128, 8),  # of an elastic run with fewer ranks than planned
    ],
)
def test_as_many_ranks_of_a_node_as_divide_the_experts(ranks: int, setting: Any, experts: int, expected: int) -> None:
    assert LearnerSpec(expert_parallel=setting).experts_over(ranks, experts) == expected


def test_a_number_must_divide_the_ranks_of_a_copy() -> None:
    assert LearnerSpec(ranks=16, shard_ranks=8, expert_parallel=8).experts_over(16) == 8
    with pytest.raises(ValidationError, match=r"expert_parallel is 16, and the 8 ranks of a copy .* set it to 8"):
        LearnerSpec(ranks=16, shard_ranks=8, expert_parallel=16)


@pytest.mark.parametrize(
    ("changes", "config", "where", "what"),
    [
        ({"learner": {"expert_parallel": 8}}, EXPERTS, "learner.expert_parallel", "does not divide the model's 12"),
        ({"learner": {"expert_parallel": 2}}, DENSE, "learner.expert_parallel", "no experts that ranks can divide"),
        ({"learner": {"expert_parallel": 2}}, EXPERTS | {"model_type": "nemotron_h2"}, "learner.expert_parallel", "no"),
        ({"learner": {"freeze_router": True}}, DENSE, "learner.freeze_router", "the model has no experts"),
        ({"learner": {"router_dtype": "float32"}}, DENSE, "learner.router_dtype", "the model has no experts"),
        (REPLAY, DENSE, "algorithm.router_replay", "the model has no experts"),
        ({"learner": {"expert_parallel": 4, "freeze_router": True}} | REPLAY, EXPERTS, None, None),
        ({}, DENSE, None, None),
    ],
)
def test_keys_that_the_model_cannot_have(changes: dict[str, Any], config: Any, where: Any, what: Any) -> None:
    run = resolve_for_kind(spec(**changes), "h100")
    problems = device_problems(run, "h100", ModelShape.of_config(config))
    assert [problem.where for problem in problems] == ([] if where is None else [where])
    assert where is None or what in problems[0].what


def test_the_model_types_whose_experts_are_divided_are_those_of_transformers() -> None:
    found = {
        name
        for name, config in CONFIG_MAPPING.items()
        if "ep_dispatch_experts" in (getattr(config, "base_model_ep_plan", None) or {}).values()
    }
    assert found == DISPATCHED
