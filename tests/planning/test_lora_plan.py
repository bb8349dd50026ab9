"""What the plan makes of adapters: which versions engines load, no reference, and a 7B on one GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless.planning.memory_plan import Question
from rlhfless.planning.placement_search import placed
from rlhfless.planning.resolve import device_problems, keep_resolved, resolve_for_kind
from rlhfless.scaling.function_specs import kinds_of, publisher_of
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import GIB, published_bytes
from rlhfless.spec import RunSpec

QWEN_7B = ModelShape.of_config({
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
})  # fmt: skip
KL = {"type": "grpo", "kl": {"coefficient": 0.1}}


def spec(lora: dict[str, Any] | None = None, **parts: Any) -> RunSpec:
    model = {"path": "m"} | ({} if lora is None else {"lora": lora})
    given = {"model": model, "prompts": {"path": "p.jsonl"}, "rewards": [{"type": "exact_match"}]}
    return RunSpec.model_validate(given | parts)


@pytest.mark.parametrize(
    ("kind", "parts", "expected"),
    [
        ("cpu-core", {}, "adapter"),
        ("h100", {}, "adapter"),
        ("h100", {"generation": {"quantization": "fp8"}}, "merged"),
        ("h100", {"weights": {"transport": "cuda_ipc"}}, "merged"),
        ("cpu-core", {"generation": {"lora": "merged"}}, "merged"),
    ],
)
def test_a_version_is_an_adapter_where_engines_serve_them(kind: str, parts: dict[str, Any], expected: str) -> None:
    run = resolve_for_kind(spec({}, **parts), kind)
    assert run.generation.lora == expected
    assert run.publishes_adapters is (expected == "adapter")
    assert device_problems(run, kind) == []
    assert keep_resolved(spec({}, **parts), run).generation.lora == expected


def test_adapters_are_refused_where_engines_do_not_serve_them() -> None:
    run = spec({}, generation={"lora": "adapter", "quantization": "fp8"})
    (problem,) = device_problems(resolve_for_kind(run, "h100"), "h100")
    assert problem.where == "generation.lora"
    assert "adapter, but generation.quantization is fp8" in problem.what
    assert "set it to merged" in problem.hint
    with pytest.raises(ValidationError, match=r"generation.lora is merged, but the run trains all weights"):
        spec(generation={"lora": "merged"})


def test_the_learner_is_the_reference() -> None:
    full, adapted = (resolve_for_kind(spec(lora, algorithm=KL), "h100") for lora in (None, {}))
    for run, outputs in ((full, {"reference": "reference_logprobs", "learner": ""}),
                         (adapted, {"learner": "reference_logprobs"})):  # fmt: skip
        assert {kind.name: kind.output for kind in kinds_of(run) if kind.name in ("reference", "learner")} == outputs
        assert publisher_of(run) == "learner"
    assert not spec({}).learner_is_reference, "without a KL term there is none"


def test_a_7b_with_an_adapter_fits_on_one_gpu_of_80_gb() -> None:
    def planned(lora: dict[str, Any] | None) -> Question:
        run = spec(lora, algorithm=KL, generation={"max_tokens": 1024})
        asked = Question(resolve_for_kind(run, "h100", QWEN_7B), QWEN_7B, device_of("h100"), 1, 2048, 256 * GIB)
        return replace(asked, spec=placed(asked))

    adapted = planned({"rank": 32})
    assert adapted.plan().fits, adapted.plan().problems
    assert not adapted.spec.learner.offload
    assert planned(None).spec.learner.offload, "all weights fit only with their states in host memory"
    layers = 28 * (7 * 3584 + 2 * 28 * 128 + 2 * 4 * 128 + 3 * 18944)
    assert published_bytes(QWEN_7B, adapted.spec) == 2 * 32 * layers
