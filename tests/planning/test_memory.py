"""The memory plan, with numbers worked by hand from published configurations."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from fakes.tiny_models import QWEN_05B
from rlhfless.functions.kinds import GENERATION, LEARNER, learner_phases
from rlhfless.functions.prefix_attention import NAME, packed_row
from rlhfless.planning.memory_plan import Question, edited
from rlhfless.planning.placement_search import placed
from rlhfless.planning.resolve import device_problems, keep_resolved, resolve_for_kind, timed, unplanned
from rlhfless.planning.suggestions import nearest_change
from rlhfless.prefixes.packing import SharingSequences
from rlhfless.records import FunctionName
from rlhfless.scaling.function_specs import MemoryTerms
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import (
    GIB,
    PROCESS_BYTES,
    FrozenBase,
    Scored,
    Sharded,
    activation_bytes,
    engine_parts,
    kept_bytes,
    kv_token_bytes,
    layer_token_bytes,
    learn_phases,
    logits_bytes,
    mlp_width,
    reference_phase,
    score_phase,
    sharded,
    sharing_token_bytes,
    value_phases,
)
from rlhfless.spec import CriticSpec, LearnerSpec, LoRASpec, ModelSpec, RunSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.load import check_resumable

QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN_15B = QWEN_05B | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
}
MIXTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}


def shape(config: dict[str, Any]) -> ModelShape:
    return ModelShape.of_config(config)


def spec(**parts: Any) -> RunSpec:
    return RunSpec.model_validate(
        {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "rewards": [{"type": "exact_match"}]} | parts
    )


def asked(config: dict[str, Any], kind: str, count: int, run: RunSpec) -> Question:
    return Question(resolve_for_kind(run, kind), shape(config), device_of(kind), count, 2048, 64 * GIB)


def test_a_teacher_is_planned_with_its_own_sizes() -> None:
    teachers = [{"name": "big", "path": "y", "ranks": 2}, {"name": "same", "path": "self", "ranks": 2}]
    run = spec(algorithm={"type": "distill", "kl": {"coefficient": 0.1}}, teachers=teachers, reference={"ranks": 2})
    question = asked(QWEN_05B, "h100", 2, run)
    question = dataclasses.replace(question, frozen={"teacher_big": shape(QWEN_7B)})
    plans = {part.function: part for part in question.plan().devices[0].functions}
    (big,), (same,), (reference,) = (plans[name].phases for name in ("teacher_big", "teacher_same", "reference"))
    assert same.size_bytes == reference.size_bytes
    # A rank has half of the weights, each of 2 bytes.
    difference = 2 * (shape(QWEN_7B).parameters - shape(QWEN_05B).parameters) // 2
    assert big.size_bytes - same.size_bytes > difference


def test_open_ranks_of_a_teacher_are_found() -> None:
    run = spec(algorithm="distill", teachers=[{"name": "big", "path": "y"}])
    question = dataclasses.replace(asked(QWEN_05B, "h100", 4, run), frozen={"teacher_big": shape(QWEN_7B)})
    found = placed(question)
    assert found.teachers[0].ranks != "auto"
    assert dataclasses.replace(question, spec=found).plan().fits
    assert keep_resolved(run, found).teachers[0].ranks == found.teachers[0].ranks


def test_parameters_are_those_that_the_models_are_known_by() -> None:
    assert shape(QWEN_7B).parameters == pytest.approx(7.62e9, rel=0.002)
    assert shape(QWEN_05B).parameters == pytest.approx(0.494e9, rel=0.002)
    assert shape(MIXTRAL).parameters == pytest.approx(46.7e9, rel=0.002)


def test_kv_of_a_token() -> None:
    assert kv_token_bytes(shape(QWEN_7B), "bfloat16", 1) == 2 * 28 * 4 * 128 * 2 == 57_344
    assert kv_token_bytes(shape(QWEN_7B), "bfloat16", 2) == 28_672
    assert kv_token_bytes(shape(QWEN_7B), "bfloat16", 8) == 14_336  # four key heads on eight devices: one on each


def test_activations_by_hand() -> None:
    small = shape(QWEN_05B | {"hidden_size": 10, "num_attention_heads": 2, "head_dim": 4, "intermediate_size": 30,
                              "num_key_value_heads": 1, "num_hidden_layers": 3})  # fmt: skip
    assert mlp_width(small) == 30
    assert layer_token_bytes(small, "float32") == 24 * 10 + 16 * (8 + 4) + 16 * 30 == 912
    assert layer_token_bytes(small, "bfloat16") == 16 * 10 + 10 * (8 + 4) + 8 * 30 == 520
    assert activation_bytes(small, 5, "float32", checkpointing=False) == 3 * 5 * 912
    assert activation_bytes(small, 5, "float32", checkpointing=True) == 3 * 5 * 4 * 10
    assert activation_bytes(small, 5, "bfloat16", checkpointing=True) == 3 * 5 * 2 * 10
    assert sharing_token_bytes(small, "float32", backward=True) == 8 * (12 + 14 * 4) == 544
    assert sharing_token_bytes(small, "bfloat16", backward=False) == 8 * (4 + 8 * 2)
    assert sharing_token_bytes(small, "bfloat16", backward=False, on_gpu=True) == 8 * 2 * 2
    assert sharing_token_bytes(small, "bfloat16", backward=True, on_gpu=True) == 8 * (4 + 5 * 2)
    assert sharing_token_bytes(small, "float32", backward=True, on_gpu=True) == 544, "padded, or as on a CPU"
    assert logits_bytes(small, 5, 2**25, 5) == 5 * 4 * 5 * 151936 + 8 * 5 * 10
    assert logits_bytes(small, 10**6, 2**25, 5) == 5 * 4 * 2**25 + 8 * 10**6 * 10


def test_a_token_passes_two_of_eight_experts() -> None:
    assert mlp_width(shape(MIXTRAL)) == 2 * 14336


def sizes(how: Sharded) -> dict[str, int]:
    """Of 7B without tokens."""
    return {phase.name: phase.size_bytes for phase in learn_phases(shape(QWEN_7B), 0, how, 2**25)}


def test_16_bytes_a_parameter_are_shared_by_all_ranks() -> None:
    """G = 2 h (q + k) + 3 h I = 233,046,016 and R = 2 h V = 1,089,994,752."""
    p, g, r = shape(QWEN_7B).parameters, 233_046_016, 1_089_994_752
    assert p == 28 * g + r
    alone = sizes(Sharded(1, "bfloat16"))
    assert alone == {
        "learn": 16 * p + 2 * p + 2 * r // 2 + 4 * r,
        "publish": 12 * p + 4 * (g + r + r // 2),
        "restore": 12 * p,
    }
    eight = sizes(Sharded(8, "bfloat16", checkpointing=True))
    assert eight["publish"] == 12 * p // 8 + 4 * (g + r + r // 2)
    assert eight["learn"] == 16 * p // 8 + max(2 * r + 2 * 2 * g + 2 * r // 2 + 8 * g, 6 * r)
    offloaded = sizes(Sharded(8, "bfloat16", checkpointing=True, offload=True))
    assert eight["learn"] - offloaded["learn"] == 2 * p


def test_an_average_takes_4_bytes_a_parameter_in_all_phases() -> None:
    p = shape(QWEN_7B).parameters
    kept, without = (sizes(Sharded(8, "bfloat16", averaged=averaged)) for averaged in (True, False))
    assert {name: size - without[name] for name, size in kept.items()} == dict.fromkeys(kept, 4 * p // 8)
    offloaded = [sizes(Sharded(8, "bfloat16", offload=True, averaged=averaged)) for averaged in (True, False)]
    assert offloaded[0] == offloaded[1], "it is where the weights are"
    assert sharded(LearnerSpec(ema_decay=0.9)).averaged
    assert [kept_bytes(4 * p, averaged=averaged) for averaged in (True, False)] == [16 * p, 12 * p]


CASES = [
    (1, LearnerSpec(), 2),
    (8, LearnerSpec(dtype="bfloat16", gradient_checkpointing=True, head_dtype="float32"), 2),
    (32, LearnerSpec(dtype="bfloat16", gradient_checkpointing=True, shard_ranks=8), 2),
    *(
        pytest.param(*case, marks=pytest.mark.long)  # seconds each
        for case in (
            (1, LearnerSpec(dtype="bfloat16", gradient_checkpointing=True), 4),
            (4, LearnerSpec(), 2),
            (8, LearnerSpec(dtype="bfloat16"), 4),
            (8, LearnerSpec(dtype="bfloat16", gradient_checkpointing=True), 4),
        )
    ),
]


@pytest.mark.parametrize(("ranks", "learner", "layers"), CASES)
def test_the_learners_own_code_holds_what_the_plan_says(ranks: int, learner: LearnerSpec, layers: int) -> None:
    """A few layers of a large model, two micro-batches, on devices that are not there."""
    from rlhfless.functions.memory_dry_run import peak_bytes

    sizes = QWEN_7B | {"num_hidden_layers": layers}
    held = peak_bytes(Qwen2Config(**sizes), learner, ranks, rows=4, width=1024)
    how = Sharded(
        learner.split_over(ranks),
        learner.dtype,
        learner.recomputes,
        exact_head=learner.head_dtype is not None,
        copies=ranks // learner.split_over(ranks),
    )
    learn = learn_phases(shape(sizes), 4 * 1024, how, 2**25)[0]
    assert learn.size_bytes == pytest.approx(held["total"], rel=0.1), (learn, held)


QWEN_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}

DIVIDED = [
    (8, {"expert_parallel": 8}),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            (8, {"expert_parallel": 1}),
            (16, {"expert_parallel": 8}),
            (32, {"expert_parallel": 8}),
            (32, {"expert_parallel": 8, "shard_ranks": 8}),
            (8, {"expert_parallel": 8, "gradient_checkpointing": False}),
        )
    ),
]


@pytest.mark.parametrize(("ranks", "changes"), DIVIDED)
def test_divided_experts_hold_what_the_plan_says(ranks: int, changes: dict[str, Any]) -> None:
    """Two layers of 30B-A3B, whose tokens are sent evenly to all ranks."""
    from transformers import Qwen3MoeConfig

    from rlhfless.functions.memory_dry_run import peak_bytes

    sizes = QWEN_30B_A3B | {"num_hidden_layers": 2}
    learner = LearnerSpec(**{"dtype": "bfloat16", "gradient_checkpointing": True, "ranks": ranks} | changes)
    config = Qwen3MoeConfig(**{key: value for key, value in sizes.items() if key != "torch_dtype"})
    held = peak_bytes(config, learner, ranks, rows=4, width=1024)
    how = dataclasses.replace(sharded(learner), sharing=False)
    assert how.expert_ranks == changes["expert_parallel"]
    learn = learn_phases(shape(sizes), 4 * 1024, how, 2**25)[0]
    # Whole experts are reduced before the next layer's are gathered, which the plan counts together.
    below = 0.1 if how.expert_ranks > 1 else 0.25
    assert (1 - 0.1) * held["total"] <= learn.size_bytes <= (1 + below) * held["total"], (learn, held)


@pytest.mark.parametrize("ranks", [1, 8])
def test_an_adapter_holds_what_the_plan_says(ranks: int) -> None:
    from rlhfless.functions.memory_dry_run import peak_bytes

    sizes = QWEN_7B | {"num_hidden_layers": 2}
    learner = LearnerSpec(dtype="bfloat16", gradient_checkpointing=True, head_dtype="float32")
    held = peak_bytes(Qwen2Config(**sizes), learner, ranks, rows=4, width=1024, lora=LoRASpec(rank=64, alpha=64))
    model = ModelSpec(path="m", dtype="bfloat16", lora=LoRASpec(rank=64))
    base = FrozenBase.of(shape(sizes), model)
    assert base is not None
    of_layer = 7 * 3584 + 2 * 28 * 128 + 2 * 4 * 128 + 3 * 18944
    assert base.parameters == 64 * 2 * of_layer
    how = Sharded(ranks, "bfloat16", True, exact_head=True, adapter=base)
    learn = learn_phases(shape(sizes), 4 * 1024, how, 2**25)[0]
    assert learn.size_bytes == pytest.approx(held["total"], rel=0.1), (learn, held)
    assert held["AdamW"] == 8 * base.parameters


def test_a_7b_with_an_adapter_is_learned_on_one_gpu() -> None:
    """On one H100, all weights of a 7B take 16 bytes each; frozen they take 2, and embeddings and head 4."""
    seven = shape(QWEN_7B)
    whole, adapter = (
        learn_phases(seven, 8192, Sharded(1, "bfloat16", True, exact_head=True, adapter=base), 2**25)[0].size_bytes
        for base in (None, FrozenBase.of(seven, ModelSpec(path="m", dtype="bfloat16", lora=LoRASpec())))
    )
    assert whole > 120 * GIB
    assert adapter < 50 * GIB


@pytest.mark.parametrize("form", ["eager", "unknown"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_scores_of_eager_attention_are_counted(form: Any, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sequences of 512 tokens and 28 heads: more than all weights of a layer of 7B."""
    from rlhfless.functions import memory_dry_run

    monkeypatch.setattr(memory_dry_run, "load_fused", lambda load: load("eager"))
    sizes = QWEN_7B | {"num_hidden_layers": 2}
    learner = LearnerSpec(dtype="bfloat16", gradient_checkpointing=checkpointing, micro_batch_tokens=2048)
    run = spec(learner={"dtype": "bfloat16", "gradient_checkpointing": checkpointing, "micro_batch_tokens": 2048})
    eager = dataclasses.replace(shape(sizes), attention_form=form)
    learn = learner_phases(MemoryTerms(run, eager, device_of("h100"), 512), 2048)[0]
    held = memory_dry_run.peak_bytes(Qwen2Config(**sizes), learner, 1, rows=4, width=512)["total"]
    assert held <= learn.size_bytes <= 1.2 * held
    assert ("decided at load" in learn.parts[-1].name) == (form == "unknown")


@pytest.mark.parametrize(
    ("ranks", "critic", "layers"),
    [
        (8, CriticSpec(dtype="bfloat16", gradient_checkpointing=True), 4),
        pytest.param(4, CriticSpec(dtype="float32"), 2, marks=pytest.mark.long),
        pytest.param(1, CriticSpec(dtype="bfloat16"), 2, marks=pytest.mark.long),
    ],
)
def test_the_critics_own_code_holds_what_the_plan_says(ranks: int, critic: CriticSpec, layers: int) -> None:
    from fakes.dry_runs import critic_peak_bytes

    sizes = QWEN_7B | {"num_hidden_layers": layers}
    held = critic_peak_bytes(Qwen2Config(**sizes), critic, ranks, rows=4, width=1024)
    how = dataclasses.replace(sharded(critic.model_copy(update={"ranks": ranks})), sharing=False)
    learn = value_phases(shape(sizes), 4 * 1024, how)[0]
    assert learn.size_bytes == pytest.approx(held["total"], rel=0.1), (learn, held)


def test_a_critic_by_hand() -> None:
    """7B without an output head on four ranks, in bfloat16 and without checkpointing."""
    sizes = shape(QWEN_7B)
    p, root, tokens = sizes.parameters - sizes.head, sizes.head, 1000
    g, layer = (p - root) // 28, layer_token_bytes(sizes, "bfloat16")
    learn, values, restore = value_phases(sizes, tokens, Sharded(4, "bfloat16"))
    states = [math.ceil(p / 4) * size for size in (4, 4, 8)]
    moment = [2 * root + 4 * g, 28 * tokens * layer, 0, 8 * g]  # a layer is reduced
    assert [part.size_bytes for part in learn.parts] == [*states, *moment]
    assert [part.size_bytes for part in restore.parts] == [states[0], states[2]]
    assert [part.size_bytes for part in values.parts] == [states[0], states[2], 2 * (root + 2 * g), 2 * tokens * layer]


def test_the_host_keeps_the_states_of_all_that_are_offloaded() -> None:
    run = spec(algorithm="ppo", critic={"offload": True, "ranks": 4}, learner={"ranks": 4})
    plan = dataclasses.replace(asked(QWEN_7B, "h100", 8, run)).plan()
    p, body = shape(QWEN_7B).parameters, shape(QWEN_7B).parameters - shape(QWEN_7B).head
    assert plan.host_bytes == 16 * body + 4 * p
    assert plan.checkpoint_bytes == 12 * (body + p)


def test_a_critic_has_the_most_ranks_that_fit_and_the_frozen_models_those_of_a_node() -> None:
    """On GPUs of 80 GB on all thirteen devices of the learner's side; of 48 GB on eight, the reference on others."""
    run = spec(
        algorithm={"type": "ppo", "kl": {"coefficient": 0.01}},
        critic={},
        placement={"mode": "disaggregated", "learner_devices": 13},
        learner={"ranks": 13},
    )
    question = asked(QWEN_7B, "h100", 17, run)
    for device, ranks, frozen in (("h100", 13, 8), ("l40s", 8, 2)):
        tight = dataclasses.replace(question, sheet=device_of(device))
        found = placed(tight)
        assert found.critic is not None
        assert (found.critic.dtype, found.critic.gradient_checkpointing) == ("bfloat16", True)
        assert (found.critic.ranks, found.reference.ranks) == (ranks, frozen)
        assert dataclasses.replace(tight, spec=found).plan().fits
    for reference in (1, 2, 4, 8, 13):
        more = edited(found, {"critic.ranks": 13, "reference.ranks": reference})
        assert not dataclasses.replace(tight, spec=more).plan().fits


@pytest.mark.parametrize(("ranks", "dtype"), [(4, "bfloat16"), (8, "float32")])
def test_the_references_own_code_holds_what_the_plan_says(ranks: int, dtype: Any) -> None:
    from fakes.dry_runs import frozen_peak_bytes

    sizes = QWEN_7B | {"num_hidden_layers": 2}
    held = frozen_peak_bytes(Qwen2Config(**sizes), dtype, ranks, rows=4, width=1024)
    phase = reference_phase(shape(sizes), 4 * 1024, dtype, 2**25, sharing=False, ranks=ranks)
    assert phase.size_bytes == pytest.approx(held["total"], rel=0.1), (phase, held)


def test_reward_models_by_hand() -> None:
    """Two of 7B without an output head on four ranks; what is gathered and passes is one's."""
    p, r = shape(QWEN_7B).parameters, 1_089_994_752
    g = (p - r) // 28
    scored = Scored(shape(QWEN_7B), 1000, "bfloat16")
    (weights, gathered, passing) = (part.size_bytes for part in score_phase([scored, scored], 4).parts)
    assert weights == 2 * 2 * math.ceil((p - r // 2) / 4)
    assert gathered == 2 * (r // 2 + 2 * g)
    assert passing == 2 * 1000 * layer_token_bytes(shape(QWEN_7B), "bfloat16")
    assert [part.size_bytes for part in score_phase([scored], 1).parts][1] == 0


def test_ranks_of_reference_and_reward_model_follow_from_the_plan() -> None:
    """On GPUs of 80 GB beside a learner of 39 GiB a rank, they are on each of its four devices; on those of 48 GB on as
    many of eight as fit."""
    run = spec(
        rewards=[{"type": "reward_model", "path": "r"}],
        algorithm={"kl": {"coefficient": 0.01}},
        reference={"ranks": "auto"},
        scoring={"reward_model_ranks": "auto"},
        placement={"mode": "disaggregated", "learner_devices": 4},
        learner={"ranks": 4},
    )
    question = dataclasses.replace(asked(QWEN_7B, "h100", 5, run), rewards=((run.reward_models[0], shape(QWEN_7B)),))
    decided = placed(question)
    assert (decided.reference.ranks, decided.scoring.reward_model_ranks) == (4, 4)
    wide = edited(question.spec, {"placement.learner_devices": 8, "learner.ranks": 8})
    tight = dataclasses.replace(question, sheet=device_of("l40s"), spec=wide, count=9)
    found = placed(tight)
    assert dataclasses.replace(tight, spec=found).plan().fits
    counts = (found.reference.ranks, found.scoring.reward_model_ranks)
    for key, ranks in zip(("reference.ranks", "scoring.reward_model_ranks"), counts, strict=True):
        more = edited(found, {key: 2 * ranks})
        assert ranks == 8 or not dataclasses.replace(tight, spec=more).plan().fits
    assert resolve_for_kind(run, "cpu-core").reference.ranks == 1


@pytest.mark.parametrize(
    ("count", "placement", "ranks", "learner", "shard_ranks"),
    [
        (16, {}, 16, {}, 8),
        (8, {}, 8, {}, "auto"),
        (20, {"mode": "disaggregated", "learner_devices": 12}, 12, {}, 4),
        (19, {"mode": "disaggregated", "learner_devices": 11}, 11, {}, "auto"),
        (16, {}, 16, {"shard_ranks": 4}, 4),
        (16, {}, 16, {"offload": True}, "auto"),
    ],
    ids=["two nodes", "one node", "eight and four", "eight and three", "what is set", "offloaded"],
)
def test_states_are_split_inside_of_nodes_where_they_fit(
    count: int, placement: dict[str, Any], ranks: int, learner: dict[str, Any], shard_ranks: Any
) -> None:
    run = spec(
        placement={"mode": "colocated"} | placement,
        learner={"ranks": ranks} | learner,
        generation={"engine": {"gpu_memory_fraction": 0.6}},
    )
    question = asked(QWEN_7B, "h200", count, run)
    decided = placed(question)
    assert decided.learner.shard_ranks == shard_ranks
    plan = dataclasses.replace(question, spec=decided).plan()
    assert plan.fits
    copies = 1 if shard_ranks == "auto" else ranks // shard_ranks
    assert plan.checkpoint_bytes == copies * 12 * shape(QWEN_7B).parameters
    wide = dataclasses.replace(question, spec=edited(decided, {"learner.shard_ranks": "auto"})).plan()
    assert max(plan.devices, key=lambda device: device.size_bytes).size_bytes >= max(
        device.size_bytes for device in wide.devices
    )


def way_bytes(sizes: dict[str, Any], ranks: int, number_bytes: int) -> int:
    """The bucket; the embeddings twice as they are published, and a rank's part of them in float32."""
    whole = sizes["vocab_size"] * sizes["hidden_size"]
    return (256 << 20) + 2 * number_bytes * whole + 4 * whole // ranks


def test_what_engines_copy_from_on_the_learners_gpus_is_counted() -> None:
    for ranks in (1, 8):
        terms = (shape(QWEN_7B), device_of("h200"), 1024)
        by_file = LEARNER.phases(MemoryTerms(spec(learner={"ranks": ranks}), *terms))
        run = spec(learner={"ranks": ranks}, weights={"transport": "cuda_ipc"})
        more = [
            after.size_bytes - before.size_bytes
            for before, after in zip(by_file, LEARNER.phases(MemoryTerms(run, *terms)), strict=True)
        ]
        assert more == [way_bytes(QWEN_7B, ranks, 4)] * len(by_file)


def test_engines_copy_from_a_learner_that_sleeps() -> None:
    by_file = asked(QWEN_05B, "h100", 1, spec(placement={"mode": "colocated", "turns": True}))
    on_gpu = dataclasses.replace(by_file, spec=edited(by_file.spec, {"weights.transport": "cuda_ipc"}))
    (before,), (after,) = by_file.plan().devices, on_gpu.plan().devices
    more = way_bytes(QWEN_05B, 1, 2)
    assert [part.asleep_bytes for part in after.functions] == [
        part.asleep_bytes + more * part.publishes for part in before.functions
    ]
    assert after.size_bytes == before.size_bytes + more
    assert on_gpu.plan().micro_batch_tokens < by_file.plan().micro_batch_tokens
    shared = dataclasses.replace(on_gpu, spec=edited(on_gpu.spec, {"placement.tenants": 3}))
    (of_three,) = shared.plan().devices
    assert of_three.size_bytes == after.size_bytes + 2 * (more + len(after.functions) * PROCESS_BYTES)


def test_states_that_a_node_cannot_hold_are_split_over_all_ranks() -> None:
    """32 B parameters: 65 GiB of states on each of eight GPUs, 33 on each of sixteen."""
    large = QWEN_7B | {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27648,
                       "num_attention_heads": 40, "num_key_value_heads": 8}  # fmt: skip
    run = spec(
        placement={"mode": "disaggregated", "learner_devices": 16},
        learner={"ranks": 16},
        generation={"engine": {"tensor_parallel_size": 4}},
    )
    question = asked(large, "h100", 24, run)
    decided = placed(question)
    assert decided.learner.shard_ranks == "auto"
    assert dataclasses.replace(question, spec=decided).plan().fits
    assert placed(asked(large, "b200", 24, run)).learner.shard_ranks == 8
    set_too_small = asked(large, "h100", 24, edited(run, {"learner.shard_ranks": 8}))
    change = nearest_change(dataclasses.replace(set_too_small, spec=placed(set_too_small)))
    assert change is not None
    assert change.text == "learner.shard_ranks: auto"


def test_blocks_of_logits_are_the_largest_of_which_twice_as_large_ones_fit() -> None:
    run = spec(placement={"mode": "disaggregated", "learner_devices": 4}, learner={"ranks": 4})
    roomy = asked(QWEN_7B, "h100", 5, run)
    assert placed(roomy).learner.logits_mib == 2048
    assert placed(asked(QWEN_7B, "h100", 5, edited(run, {"learner.logits_mib": 300}))).learner.logits_mib == 300
    tight = asked(QWEN_7B, "l40s", 5, run)
    decided = placed(tight)
    assert decided.learner.logits_mib == 512
    for mib, fits in ((1024, True), (2048, False)):
        changed = edited(decided, {"learner.logits_mib": mib})
        assert dataclasses.replace(tight, spec=changed).plan().fits is fits
    assert resolve_for_kind(run, "cpu-core").learner.logits_elements is None


def test_an_engines_parts_by_hand() -> None:
    parts = engine_parts(shape(QWEN_7B), "bfloat16", 2, 8192, 256, graphs=False)
    assert {part.name: part.size_bytes for part in parts} == {
        "weights": shape(QWEN_7B).parameters,
        "activations": 2 * 8192 * (4 * 3584 + 3 * 18944 // 2),
        "sampler": 3 * 4 * 256 * 152064,
        "CUDA graphs": 0,
    }


def test_an_engine_in_8_bits_by_hand() -> None:
    """7.6 B parameters, 1.09 B of them in embeddings and head, which keep 16 bits; rows of 3,584 and more."""
    qwen = shape(QWEN_7B)
    root = 2 * 152064 * 3584
    in_layers = qwen.parameters - root
    weights, *others = engine_parts(qwen, "bfloat16", 1, 8192, 256, graphs=False, eight_bits=True)
    assert weights.size_bytes == 2 * root + in_layers + 4 * in_layers // 3584
    assert others == list(engine_parts(qwen, "bfloat16", 1, 8192, 256, graphs=False)[1:])


def test_drafts_by_hand() -> None:
    """A draft model takes its weights, and KV of the same tokens; each draft is a row of the sampler. What an engine
    cannot do with it, taking turns, is not what the plan advises."""
    speculation = {"method": "draft_model", "model": "d", "depth": 3}
    run = spec(model={"path": "m", "dtype": "bfloat16"}, generation={"speculation": speculation})
    plain = asked(QWEN_7B, "h100", 1, spec(model={"path": "m", "dtype": "bfloat16"}))
    drafting = dataclasses.replace(asked(QWEN_7B, "h100", 1, run), draft=shape(QWEN_05B))
    parts = [
        {part.name: part.size_bytes for part in GENERATION.phases(terms_of(each))[0].parts}
        for each in (plain, drafting)
    ]
    assert parts[1]["draft's weights"] == 2 * shape(QWEN_05B).parameters
    assert (parts[0]["sampler"], parts[1]["sampler"]) == (3 * 4 * 256 * 152064, 3 * 4 * 1024 * 152064)
    assert parts[0]["KV"] - parts[1]["KV"] == parts[1]["draft's weights"] + 3 * 4 * 768 * 152064
    per_token = [2 * shape(config).kv_width * shape(config).layers for config in (QWEN_7B, QWEN_05B)]
    assert drafting.plan().kv_tokens == parts[1]["KV"] * 2048 // (2048 * sum(per_token))
    assert dataclasses.replace(drafting, draft=None).plan().kv_tokens > drafting.plan().kv_tokens  # type: ignore[operator]
    change = nearest_change(dataclasses.replace(drafting, sheet=device_of("l40s")))
    assert change is None or "placement.turns" not in change.text


def terms_of(question: Question) -> MemoryTerms:
    return MemoryTerms(question.spec, question.shape, question.sheet, 2048, draft=question.draft)


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize(("dtype", "checkpointing"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_what_torch_keeps_for_the_backward_pass(dtype: Any, checkpointing: bool, sharing: bool) -> None:
    """Counted in a real model, by the difference of two numbers of layers."""
    _check_kept(_config, dtype, checkpointing, sharing)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_torch_keeps_of_experts(dtype: Any) -> None:
    # Scores, indices and weights of the routing, 36 bytes a token and expert here, are not counted.
    _check_kept(_config_of_experts, dtype, False, False, tolerance=0.03)


def _check_kept(config_of: Any, dtype: Any, checkpointing: bool, sharing: bool, tolerance: float = 0.02) -> None:
    kept = [_kept_by_torch(config_of(layers), dtype, checkpointing, sharing) for layers in (2, 4)]
    config = config_of(2).to_dict() | {"torch_dtype": "bfloat16"}
    one = layer_token_bytes(shape(config), dtype)
    expected = 2 * config["hidden_size"] if checkpointing else one
    assert (kept[1] - kept[0]) / 2 / TOKENS == pytest.approx(expected, rel=tolerance)


TOKENS = 64


def _config(layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=50,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attn_implementation="sdpa",
    )


def _config_of_experts(layers: int) -> Any:
    """Experts whose routing, an integer and a weight per expert, is small beside their activations."""
    from transformers import Qwen3MoeConfig

    sizes = _config(layers).to_dict()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    return Qwen3MoeConfig(**{name: sizes[name] for name in names}, **experts, attn_implementation="sdpa")


def _kept_by_torch(config: Any, dtype: str, checkpointing: bool, sharing: bool) -> int:
    """Bytes, without the weights. `sharing`: two sequences with 40 tokens in common."""
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    row: dict[str, Any] = {}
    if sharing:
        model.set_attn_implementation(NAME)
        sequences = np.r_[np.arange(40), np.arange(50, 62), np.arange(40), np.arange(70, 82)]
        packed = SharingSequences(sequences, np.array([52, 52])).pack(np.arange(2))
        assert len(packed.source) == TOKENS
        row = packed_row(packed, torch.device("cpu"), varlen=False)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape)[::-1] for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights and tuple(tensor.shape) not in shapes:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(0, 50, (1, TOKENS))
    counting = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with counting:
        model.get_decoder()(input_ids=tokens, use_cache=False, **row)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_05b_fits_beside_its_engine_on_one_h100_and_7b_with_two_ranks() -> None:
    """16 bytes for 0.494 B parameters are 8 GB; for 7.6 B they are 122 GB, which no H100 holds alone."""
    small = asked(QWEN_05B, "h100", 1, spec())
    run = placed(small)
    assert run.placement.mode == "colocated"
    fits = dataclasses.replace(small, spec=run).plan()
    assert fits.fits
    (device,) = fits.devices
    assert sorted(part.function for part in device.functions) == [FunctionName.GENERATION, FunctionName.LEARNER]
    assert device.size_bytes <= device.memory_bytes == 80_000_000_000
    assert fits.micro_batch_tokens >= 8192

    large = dataclasses.replace(asked(QWEN_7B, "h100", 8, spec()), sequence_tokens=2048)
    decided = placed(large)
    assert (decided.placement.mode, decided.learner.ranks) == ("colocated", 8)
    large = dataclasses.replace(
        asked(QWEN_7B, "h100", 8, spec(learner={"ranks": 1, "offload": False})), sequence_tokens=2048
    )
    run = placed(large)
    assert (run.placement.mode, run.learner.ranks) == ("disaggregated", 1)
    refused = dataclasses.replace(large, spec=run).plan()
    assert not refused.fits
    assert "learner 135.0 GiB in learn" in refused.problems[0]
    change = nearest_change(dataclasses.replace(large, spec=run))
    assert change is not None
    assert change.text == "learner.ranks: 2 and placement.learner_devices: 2"


def test_ranks_that_are_left_open_follow_from_the_plan() -> None:
    run = spec(learner={"ranks": "auto"})
    together = placed(asked(QWEN_7B, "h100", 8, run))
    assert (together.placement.mode, together.learner.ranks) == ("colocated", 8)
    apart = asked(QWEN_7B, "h100", 8, edited(run, {"placement.mode": "disaggregated"}))
    decided = placed(apart)
    assert (decided.learner.ranks, decided.placement.learner_devices) == (2, 2)
    assert dataclasses.replace(apart, spec=decided).plan().fits
    assert not dataclasses.replace(apart, spec=edited(decided, {"learner.ranks": 1})).plan().fits
    chosen = spec(learner={"ranks": "auto"}, placement={"mode": "disaggregated", "learner_devices": 4})
    assert placed(asked(QWEN_7B, "h100", 8, chosen)).learner.ranks == 4
    assert resolve_for_kind(run, "cpu-core").learner.ranks == 1
    nothing_fits = placed(asked(QWEN_7B, "l40s", 2, run))
    assert isinstance(nothing_fits.learner.ranks, int)


def test_a_learner_on_other_devices_by_the_memory_of_those() -> None:
    """A 7B learner takes 135.0 GiB on one device (above): two H100 hold it, and L40S the engines."""
    placement = {"mode": "disaggregated", "learner_kind": "h100", "learner_devices": 2}
    question = asked(QWEN_7B, "l40s", 4, spec(learner={"ranks": "auto", "offload": False}, placement=placement))
    run = placed(question)
    assert (run.learner.ranks, run.scaling.generation.max_actors) == (2, 4), "its devices are not generation's"
    assert (run.model.dtype, run.learner.dtype) == ("bfloat16", "bfloat16")
    plan = dataclasses.replace(question, spec=run).plan()
    assert [(device.kind, device.count, device.memory_bytes) for device in plan.devices] == [
        ("l40s", 4, 48_000_000_000),
        ("h100", 2, 80_000_000_000),
    ]
    assert plan.fits
    single = {"learner.ranks": 1, "placement.learner_devices": 1, "learner.micro_batch_tokens": 8192}
    one = dataclasses.replace(question, spec=edited(run, single | {"learner.logits_mib": 128}))
    assert "h100: 135.0 GiB are needed" in one.plan().problems[0]
    change = nearest_change(one)
    assert change is not None
    assert change.text == "learner.ranks: 2 and placement.learner_devices: 2"
    assert dataclasses.replace(one, spec=edited(one.spec, {"placement.learner_kind": "b200"})).plan().fits


def test_engines_on_cores_beside_a_learner_on_a_gpu() -> None:
    placement = {"mode": "disaggregated", "kind": "cpu-core", "learner_kind": "h100"}
    question = asked(QWEN_05B, "cpu-core", 2, spec(placement=placement))
    run = placed(question)
    assert (run.model.dtype, run.learner.dtype, run.learner.ranks) == ("float32", "bfloat16", 1)
    assert [device.kind for device in dataclasses.replace(question, spec=run).plan().devices] == ["h100", "cpu-core"]
    assert [each.where for each in device_problems(edited(run, {"learner.dtype": "float32"}), "cpu-core")] == [
        "learner.dtype"
    ]


def test_a_run_goes_on_with_what_its_devices_settled_where_the_spec_leaves_it_open() -> None:
    """On GPUs the spec that a run was started with leaves out bfloat16: to resume with it was refused."""
    given = spec()
    decided = {"learner.ranks": 4, "reference.ranks": 2, "scoring.reward_model_ranks": 2}
    decided |= {"learner.gradient_checkpointing": True, "learner.micro_batch_tokens": 9216}
    before = edited(resolve_for_kind(given, "h100"), decided)
    again = keep_resolved(given, before)
    check_resumable(before, again, "run.yaml")
    assert (again.model.dtype, again.learner.dtype, again.learner.gradient_checkpointing) == ("bfloat16",) * 2 + (True,)
    assert (again.learner.ranks, again.reference.ranks, again.scoring.reward_model_ranks) == (4, 2, 2)
    assert again.learner.micro_batch_tokens == 9216
    assert keep_resolved(spec(learner={"ranks": 8}), before).learner.ranks == 8
    chosen = keep_resolved(edited(given, {"model.dtype": "float32"}), before)
    with pytest.raises(InputError, match=r"model\.dtype: 'float32', but the run started with 'bfloat16'"):
        check_resumable(before, chosen, "run.yaml")


def test_an_engine_at_85_percent_beside_a_learner_is_refused_with_the_placement_that_works() -> None:
    run = spec(placement={"mode": "colocated"}, generation={"engine": {"gpu_memory_fraction": 0.85}})
    two = asked(QWEN_15B, "h100", 2, run)
    plan = two.plan()
    assert not plan.fits
    assert "are needed and 74.5 GiB are usable (generation 63.3 GiB in generate, learner" in plan.problems[0]
    change = nearest_change(two)
    assert change is not None
    assert change.plan.fits


def test_functions_that_take_turns_need_the_largest_of_them_and_a_process_for_each() -> None:
    side_by_side = asked(QWEN_05B, "h100", 1, spec(placement={"mode": "colocated"}))
    (together,) = side_by_side.plan().devices
    turns = dataclasses.replace(side_by_side, spec=edited(side_by_side.spec, {"placement.turns": True}))
    (in_turn,) = turns.plan().devices
    sizes = [part.largest.size_bytes for part in together.functions]
    assert together.size_bytes == sum(sizes)
    assert in_turn.size_bytes == max(sizes) + (len(sizes) - 1) * PROCESS_BYTES
    assert turns.plan().micro_batch_tokens > side_by_side.plan().micro_batch_tokens
    assert [part.asleep_bytes for part in in_turn.functions] == [PROCESS_BYTES] * len(sizes)


def test_communicators_of_ranks_and_engines_are_counted() -> None:
    """NCCL holds 0.76 GiB for each communicator of a rank, also while it sleeps, and 1 GiB for an engine on several
    devices, which gives it back."""
    parallel = {"generation": {"engine": {"tensor_parallel_size": 4}}}
    for ranks, shard_ranks, gib in ((1, 1, 0.0), (8, 8, 0.76), (8, 4, 1.52)):
        learner = {"ranks": ranks, "shard_ranks": shard_ranks}
        run = spec(placement={"mode": "colocated", "turns": True}, learner=learner, **parallel)
        (device, *_) = sorted(asked(QWEN_7B, "h100", 8, run).plan().devices, key=lambda each: -len(each.functions))
        engine, rank = sorted(device.functions, key=lambda part: part.publishes)
        assert rank.asleep_bytes == pytest.approx((0.8 + gib) * GIB)
        assert engine.asleep_bytes == PROCESS_BYTES
        assert next(part.size_bytes for part in engine.largest.parts if part.name == "tensor parallelism") == GIB
    assert sum(part.size_bytes for part in engine.largest.parts) == int(0.85 * 80e9)
    on_cores = asked(QWEN_05B, "cpu-core", 2, spec(learner={"ranks": 2})).plan().devices[0].functions
    assert all(part.asleep_bytes == 0 for part in on_cores)


def test_turns_on_one_core_hold_the_largest_function_and_of_several_cores_all() -> None:
    """Each core has its own turns, and all of them have one memory."""
    for cores in (1, 2):
        run = spec(scaling={"generation": {"min_actors": cores}}, placement={"mode": "colocated", "turns": True})
        (machine,) = asked(QWEN_05B, "cpu-core", cores, run).plan().devices
        held = [part.largest.size_bytes for part in machine.functions]
        assert machine.size_bytes == (max(held) if cores == 1 else sum(held))


def test_the_functions_of_other_runs_that_sleep_on_a_device_are_counted() -> None:
    alone = asked(QWEN_05B, "h100", 1, spec(placement={"mode": "colocated", "turns": True}))
    shared = dataclasses.replace(alone, spec=edited(alone.spec, {"placement.tenants": 3}))
    (one,), (of_three,) = alone.plan().devices, shared.plan().devices
    assert of_three.size_bytes == one.size_bytes + 2 * len(one.functions) * PROCESS_BYTES


def test_the_largest_micro_batch_is_the_largest_that_fits() -> None:
    run = spec(placement={"mode": "disaggregated"}, learner={"micro_batch_tokens": 8192})
    two = asked(QWEN_05B, "l40s", 2, run)
    most = two.plan().micro_batch_tokens
    assert most > 8192
    for tokens, fits in ((most, True), (most + 1, False)):
        at = dataclasses.replace(two, spec=edited(two.spec, {"learner.micro_batch_tokens": tokens}))
        assert at.plan().fits is fits


def test_an_engine_without_room_for_one_sequence() -> None:
    run = spec(placement={"mode": "disaggregated"}, generation={"engine": {"gpu_memory_fraction": 0.3}})
    plan = asked(QWEN_7B, "l40s", 2, run).plan()
    assert plan.kv_tokens < 0
    assert any(text.startswith("generation: room for 0 tokens of KV on an actor") for text in plan.problems)


@given(st.integers(1, 8), st.sampled_from(["h100", "b200"]), st.integers(1, 4), st.integers(256, 16384))
def test_more_devices_and_smaller_batches_never_need_more(ranks: int, kind: str, actors: int, tokens: int) -> None:
    run = spec(
        placement={"mode": "disaggregated", "learner_devices": ranks},
        scaling={"generation": {"max_actors": actors}},
        learner={"ranks": ranks, "micro_batch_tokens": tokens},
        prompts_per_step=8,
    )
    count = ranks + actors
    plan, more = asked(QWEN_05B, kind, count, run).plan(), asked(QWEN_05B, kind, count + 1, run).plan()
    half = asked(QWEN_05B, kind, count, edited(run, {"learner.micro_batch_tokens": tokens // 2})).plan()
    assert sum(device.count for device in plan.devices) <= count
    assert max(device.size_bytes for device in more.devices) <= max(device.size_bytes for device in plan.devices)
    assert max(device.size_bytes for device in half.devices) <= max(device.size_bytes for device in plan.devices)
    assert half.micro_batch_tokens == plan.micro_batch_tokens


def test_what_gpus_decide_and_what_the_user_has_said() -> None:
    on_gpus = resolve_for_kind(spec(), "h100")
    assert (on_gpus.model.dtype, on_gpus.learner.dtype) == ("bfloat16", "bfloat16")
    assert unplanned(spec(), "h100").learner.recomputes, "sizes are not known"
    said = spec(model={"path": "m", "dtype": "float16"}, learner={"gradient_checkpointing": False})
    assert resolve_for_kind(said, "h100").model.dtype == "float16"
    assert not unplanned(said, "h100").learner.recomputes
    on_cores = resolve_for_kind(spec(), "cpu-core")
    assert (on_cores.model.dtype, on_cores.placement.mode) == ("float32", "colocated")
    learner = on_cores.learner
    assert (learner.micro_batch_tokens, learner.gradient_checkpointing) == (8192, False), "bits depend on both"


def test_float32_on_gpus_is_refused_with_its_reason() -> None:
    run = spec(model={"path": "m", "dtype": "float32"})
    (problem,) = device_problems(resolve_for_kind(run, "h100"), "h100")
    assert (problem.where, "twice the memory" in problem.what) == ("model.dtype", True)
    assert device_problems(run, "cpu-core") == []
    assert device_problems(edited(run, {"placement.float32_on_gpus": True}), "h100") == []


def test_drafts_from_other_responses_are_refused_with_many_sequences_on_a_gpu() -> None:
    def problems(kind: str, method: str, most: int | str) -> list[Problem]:
        generation = {"speculation": {"method": method}, "engine": {"max_sequences": most}}
        return device_problems(resolve_for_kind(spec(generation=generation), kind), kind)

    for method, most in itertools.product(("suffix", "auto"), (33, 1024, "auto")):
        (problem,) = problems("h100", method, most)
        assert problem.where == "generation.speculation.method"
        shown = 256 if most == "auto" else most
        assert problem.what.startswith(f"{method} on h100 with {shown} sequences per actor")
        assert "set generation.engine.max_sequences: 32" in str(problem.hint)
        assert problems("h100", method, 32) == problems("cpu-core", method, most) == []
    assert problems("h100", "ngram", 1024) == problems("h100", "off", 1024) == []


def test_time_outs_by_hand() -> None:
    """15.2 GB at 1e8 bytes/s are 152.3 s: 753 s, in whole minutes 780."""
    run = spec(model={"path": "m", "dtype": "bfloat16"}, timeouts={"sync_s": 77})
    large = timed(dataclasses.replace(asked(QWEN_7B, "h100", 1, run), sequence_tokens=0))
    size_s = 2 * shape(QWEN_7B).parameters / 1e8
    assert size_s == pytest.approx(152.3, abs=0.2)
    assert large.timeouts.start_s == 780
    assert large.timeouts.sync_s == 77  # as it was set
    assert large.timeouts.call_s > 600 + size_s
    assert large.timeouts.generate_s == 3600  # which has a tenth more than this size adds


@pytest.mark.parametrize("sequence_tokens", [1, 64, 4096])
def test_time_outs_of_a_small_model_stay_as_documented(sequence_tokens: int) -> None:
    """A model of some MB adds less than a tenth: 601 s would look like a mistake."""
    small = QWEN_7B | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 999}
    found = timed(dataclasses.replace(asked(small, "h100", 1, spec()), sequence_tokens=sequence_tokens))
    assert found.timeouts == spec().timeouts


def test_a_resumed_spec_keeps_what_was_decided(tmp_path: Path) -> None:
    from rlhfless.spec.load import load_spec, resolved_yaml

    file = tmp_path / "spec.yaml"
    file.write_text(resolved_yaml(resolve_for_kind(spec(model={"path": str(tmp_path)}), "h100")))
    again = resolve_for_kind(load_spec(file), "h100")
    assert again.model.dtype == "bfloat16"
    assert again.timeouts == load_spec(file).timeouts


def test_actors_have_all_devices_of_their_side_unless_the_spec_says_how_many() -> None:
    def actors(count: int, run: RunSpec, config: dict[str, Any] = QWEN_7B) -> tuple[str, int]:
        found = asked(config, "h100", count, run)
        settled_spec = placed(dataclasses.replace(found, spec=resolve_for_kind(run, "h100")))
        return settled_spec.placement.mode, settled_spec.scaling.generation.most_actors

    assert actors(8, spec()) == ("colocated", 8)
    assert actors(8, spec(generation={"engine": {"tensor_parallel_size": 2}})) == ("colocated", 4)
    assert actors(8, spec(scaling={"generation": {"max_actors": 3}})) == ("colocated", 3)
    apart = {"mode": "disaggregated", "learner_devices": 2}
    assert actors(8, spec(placement=apart)) == ("disaggregated", 6)
    on_cores = resolve_for_kind(spec(scaling={"generation": {"min_actors": 2}}), "cpu-core").scaling.generation
    assert (on_cores.max_actors, on_cores.fixed) == (2, True)


def test_a_judge_is_planned_as_an_engine_with_its_own_sizes() -> None:
    judge = {"type": "judge", "name": "big", "path": "y", "template": "{response}", "kv_cache_gib": 3}
    run = spec(rewards=[judge | {"tensor_parallel_size": 2}], placement={"turns": True, "mode": "colocated"})
    question = dataclasses.replace(asked(QWEN_05B, "h100", 2, run), frozen={"judge_big": shape(QWEN_7B)})
    (phase,) = {part.function: part for part in question.plan().devices[0].functions}["judge_big"].phases
    parts = {part.name: part.size_bytes for part in phase.parts}
    assert parts["weights"] == 2 * shape(QWEN_7B).parameters // 2  # of two bytes, on two devices
    assert (parts["KV"], parts["process"]) == (3 * GIB, PROCESS_BYTES)
    awake = dataclasses.replace(question, spec=edited(run, {"placement.turns": False}))
    # Asleep, its weights are in the host's memory.
    assert question.plan().host_bytes - awake.plan().host_bytes >= 2 * shape(QWEN_7B).parameters
