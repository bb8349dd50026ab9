"""`generation.quantization`: what cannot work is refused, with the key, the value and what to set."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless.planning.resolve import quantization_problems
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.spec import RunSpec

SMALL: dict[str, Any] = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
OWN_ENGINE = "rlhfless.functions.generation.vllm.adapter:VllmEngine"
DENSE = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 97, "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS = DENSE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def spec(quantization: str, **changes: Any) -> RunSpec:
    generation = {"quantization": quantization} | changes.pop("generation", {})
    return RunSpec.model_validate(SMALL | {"generation": generation} | changes)


@pytest.mark.parametrize(
    ("quantization", "changes", "parts"),
    [
        ("fp4", {}, ["generation.quantization", "'fp8'"]),
        (
            "fp8",
            {"algorithm": {"type": "grpo", "importance": None}},
            ["algorithm.importance is null", "quantization to off"],
        ),
        ("fp8", {"generation": {"engine": {"type": OWN_ENGINE}}}, ["fp8 is for vLLM", OWN_ENGINE, "set it to off"]),
        (
            "fp8",
            {"generation": {"speculation": {"method": "mtp"}}},
            ["has not been tried with draft weights", "ngram or suffix"],
        ),
    ],
)
def test_what_cannot_work_is_refused(quantization: str, changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        spec(quantization, **changes)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("quantization", "kind", "dtype", "config", "what", "hint"),
    [
        ("fp8", "a100-80gb", "bfloat16", DENSE, "a100-80gb has no products of 8 bit floats", "set it to off"),
        ("fp8", "h100", "float32", DENSE, "model.dtype is float32", "set model.dtype to bfloat16"),
        ("fp8", CPU_KIND, "float32", EXPERTS, "the model has experts", "set it to off"),
        ("fp8", "h100", "bfloat16", DENSE, None, None),
        ("fp8", "mi300x", "bfloat16", DENSE, None, None),
        ("fp8", CPU_KIND, "float32", DENSE, None, None),
        ("off", "a100-80gb", "float32", EXPERTS, None, None),
    ],
)
def test_devices_and_models(
    quantization: str, kind: str, dtype: str, config: dict[str, Any], what: str | None, hint: str | None
) -> None:
    asked = spec(quantization, model={"path": "m", "dtype": dtype})
    problems = quantization_problems(asked, kind, ModelShape.of_config(config))
    if what is None:
        assert problems == []
        return
    (problem,) = problems
    assert problem.where == "generation.quantization"
    assert f"{quantization}, but {what}" in problem.what
    assert problem.hint == hint
