"""Models of use start with the defaults, or the hint names edits of the user's own spec with which they do."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from rlhfless.planning.memory_plan import Question, edited
from rlhfless.planning.placement_search import BATCH_SEQUENCES, placed
from rlhfless.planning.resolve import resolve_for_kind
from rlhfless.planning.suggestions import nearest_change
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import GIB
from rlhfless.spec import RunSpec


def _config(
    hidden: int, mlp: int, heads: int, layers: int, kv_heads: int, *, vocabulary: int = 151936, tied: bool = False
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": mlp, "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "tie_word_embeddings": tied, "head_dim": 128,
        "torch_dtype": "bfloat16",
    }  # fmt: skip


MODELS = {
    "0.6B": _config(1024, 3072, 16, 28, 8, tied=True),
    "1.5B": _config(1536, 8960, 12, 28, 2, tied=True),
    "3B": _config(2048, 11008, 16, 36, 2, tied=True),
    "7B": _config(3584, 18944, 28, 28, 4, vocabulary=152064),
    "14B": _config(5120, 17408, 40, 40, 8),
    "32B": _config(5120, 25600, 64, 64, 8),
    "72B": _config(8192, 29568, 64, 80, 8, vocabulary=152064),
}
COUNTS = (1, 2, 4, 8, 16)
BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "prompts": {"path": "p.jsonl"},
    "rewards": [{"type": "exact_match"}],
    "prompts_per_step": 128,
    "samples_per_prompt": 8,
}


def _asked(model: str, kind: str, count: int, **parts: Any) -> Question:
    """The question as `question_of` asks it: `given` is the user's own spec."""
    given = resolve_for_kind(RunSpec.model_validate(BASE | parts), kind)
    shape = ModelShape.of_config(MODELS[model])
    asked = Question(given, shape, device_of(kind), count, 2048, 1024 * GIB, given=given)
    return replace(asked, spec=placed(asked))


@pytest.mark.parametrize("kind", ["l40s", "h100", "b200"])
def test_a_run_fits_or_the_hint_does_when_it_is_applied_to_the_users_spec(kind: str) -> None:
    for model, count in itertools.product(MODELS, COUNTS):
        asked = _asked(model, kind, count)
        if asked.plan().fits:
            continue
        change = nearest_change(asked)
        assert change is not None, (model, kind, count)
        values, devices = {}, (kind, count)
        for part in change.text.split(" and "):
            if " x " in part:
                number, name = part.split(" x ")
                devices = (name, int(number))
            else:
                key, value = part.split(": ")
                values[key] = {"true": True}.get(value) or int(value)
        assert asked.given is not None
        applied = replace(asked, spec=edited(asked.given, values), sheet=device_of(devices[0]), count=devices[1])
        assert replace(applied, spec=placed(applied)).plan().fits, (model, kind, count, change.text)
        assert devices[0] == kind, "devices of another kind, where edits of the spec or more devices of its own do"


@pytest.mark.parametrize(
    ("model", "count", "expected"),
    [
        ("3B", 1, {"placement.turns": True}),
        ("7B", 2, {"placement.turns": True}),
        ("7B", 8, {"placement.turns": False, "generation.engine.gpu_memory_fraction": 0.6}),
        ("14B", 4, {"placement.turns": True}),
        ("14B", 8, {"placement.turns": False, "generation.engine.tensor_parallel_size": 2}),
        ("32B", 8, {"placement.turns": False, "learner.offload": True}),
        ("32B", 16, {"placement.turns": False, "generation.engine.tensor_parallel_size": 8}),
    ],
)
def test_models_of_use_start_co_located_with_the_defaults(model: str, count: int, expected: dict[str, Any]) -> None:
    asked = _asked(model, "h100", count)
    assert asked.spec.placement.mode == "colocated"
    assert asked.spec.learner.ranks == count
    assert edited(asked.spec, expected) == asked.spec
    plan = asked.plan()
    assert plan.fits
    assert plan.kv_tokens is not None
    assert plan.kv_tokens >= BATCH_SEQUENCES * 2048


@pytest.mark.parametrize(("model", "count"), [("3B", 1), ("7B", 2), ("7B", 8), ("14B", 4), ("32B", 8)])
def test_engines_that_copy_from_the_learners_buckets_fit_where_those_that_read_files_do(model: str, count: int) -> None:
    asked, by_file = _asked(model, "h100", count, weights={"transport": "cuda_ipc"}), _asked(model, "h100", count)
    assert asked.plan().fits
    assert asked.spec.placement.turns == by_file.spec.placement.turns or asked.spec.learner.offload


def test_what_the_user_has_set_stays() -> None:
    chosen = {"generation": {"engine": {"tensor_parallel_size": 1}}}
    asked = _asked("32B", "h100", 16, **chosen)
    assert asked.spec.generation.engine.tensor_parallel_size == 1
    assert not _asked("3B", "h100", 1, placement={"turns": False}).spec.placement.turns
    overlapping = _asked("7B", "h100", 2, schedule={"type": "one_step_off"})
    assert not overlapping.spec.placement.in_turns, "nothing would overlap in turns"


def test_the_hint_takes_turns_where_the_spec_refuses_them() -> None:
    asked = _asked("3B", "h100", 1, placement={"turns": False}, learner={"offload": False})
    change = nearest_change(asked)
    assert change is not None
    assert change.text == "placement.turns: true"


def test_devices_per_actor_divide_the_heads_and_stay_on_a_machine() -> None:
    """28 heads of 7B are no multiple of 8; sixteen devices are two machines."""
    for model, count in itertools.product(MODELS, COUNTS):
        size = _asked(model, "l40s", count).spec.generation.engine.devices_per_actor
        assert MODELS[model]["num_attention_heads"] % size == 0
        assert size <= min(count, 8)


def test_a_placed_spec_is_placed_the_same_again() -> None:
    """A resumed run reads what its first start decided."""
    for model, count in itertools.product(MODELS, COUNTS):
        asked = _asked(model, "h100", count)
        if asked.plan().fits:
            assert placed(asked) == asked.spec, (model, count)


def test_a_plan_fills_no_more_than_the_driver_reports_less_two_percent() -> None:
    """An L4 of 24 GB reports some 22.0 GiB, and 24e9 bytes are 22.35; an H100 of 80 GB reports 79.2 for 74.5."""
    assert device_of("l40s").usable_bytes == int(0.98 * 48e9)
    assert device_of("h100").usable_bytes == 80_000_000_000


def test_small_models_generate_all_samples_of_a_step_at_once() -> None:
    """1,024 samples of 0.6B on one H100 were four waves of 256."""
    engine = _asked("0.6B", "h100", 2).spec.generation.engine
    assert (engine.max_sequences, engine.max_batch_tokens) == (512, 16_384)
    assert _asked("1.5B", "h100", 1).spec.generation.engine.max_sequences == 1024
    # 14B on eight devices has KV for 38 of the longest sequences per actor, and 256 samples.
    assert _asked("14B", "h100", 8).spec.generation.engine.max_sequences == 256
    chosen = _asked("0.6B", "h100", 2, generation={"engine": {"max_sequences": 64}}).spec.generation.engine
    assert (chosen.max_sequences, chosen.max_batch_tokens) == (64, 16_384)


def test_batch_tokens_are_vllms_default_for_the_device_and_the_plan_reads_them() -> None:
    def chosen(kind: str, **engine: Any) -> Question:
        return _asked("1.5B", kind, 1, generation={"engine": engine})

    tokens = {
        kind: chosen(kind).spec.generation.engine.max_batch_tokens for kind in ("h100", "b200", "l40s", "a100-80gb")
    }
    assert tokens == {"h100": 16_384, "b200": 16_384, "l40s": 8192, "a100-80gb": 8192}
    own = chosen("h100", max_batch_tokens=4096)
    assert own.spec.generation.engine.max_batch_tokens == own.spec.generation.engine.batch_tokens == 4096
    # Smaller batches leave room for more KV: the plan counts the activations of the batch that is set.
    assert (own.plan().kv_tokens or 0) > (chosen("h100", max_batch_tokens=16_384).plan().kv_tokens or 0)


@pytest.mark.parametrize("kind", ["l40s", "h100"])
def test_auto_fits_wherever_activation_checkpointing_does(kind: str) -> None:
    for model, count in itertools.product(("0.6B", "1.5B", "3B", "7B"), range(1, 9)):
        fits = _asked(model, kind, count, learner={"gradient_checkpointing": True}).plan().fits
        asked = _asked(model, kind, count)
        plan, learner = asked.plan(), asked.spec.learner
        assert plan.fits is fits, (model, count)
        assert 8192 <= learner.pass_tokens <= 65_536
        if fits and not learner.recomputes:
            assert plan.kv_tokens is not None
            assert plan.kv_tokens >= min(1024 // count, 256) * 2048, "all samples of an actor, or those of a batch"


def test_small_models_on_many_gpus_keep_their_activations() -> None:
    """0.6B keeps 2.0 MB of a token in 28 layers, 7B 7.0 MB: 16 and 57 GB for passes of 8,192."""
    kept = {
        (model, count)
        for model, count in itertools.product(MODELS, COUNTS)
        if not _asked(model, "h100", count).spec.learner.recomputes
    }
    assert kept == {("0.6B", 8), ("0.6B", 16), ("1.5B", 4), ("1.5B", 8), ("1.5B", 16)}
    asked = _asked("0.6B", "h100", 8)
    assert asked.spec.generation.engine.gpu_memory_fraction == 0.6, "0.85 without"
    assert _asked("0.6B", "h100", 8, learner={"gradient_checkpointing": True}).spec.learner.recomputes
    chosen = {"generation": {"engine": {"gpu_memory_fraction": 0.85}}}
    assert _asked("0.6B", "h100", 8, **chosen).spec.learner.recomputes, "the user's fraction stays"
    shape = replace(asked.shape, attention_form="eager")
    eager = placed(replace(asked, spec=asked.given or asked.spec, shape=shape)).learner
    assert eager.recomputes
    assert isinstance(eager.micro_batch_tokens, int)
    assert eager.micro_batch_tokens < asked.spec.learner.pass_tokens


def test_tokens_of_a_pass_by_hand() -> None:
    """7B, whose learner has two of three H100. A rank holds 16 P / 2, what every process does, and NCCL; at its peak
    also what is gathered, 2 (R + 2 G), the gradients of head and layer, 2 V h + 8 G, and for each token the inputs of
    28 layers, one layer's activations, and what shared prefixes take."""
    asked = _asked("7B", "h100", 3, placement={"mode": "disaggregated", "learner_devices": 2})
    p, head = asked.shape.parameters, 152_064 * 3584
    g = (p - 2 * head) // 28
    token = 28 * 2 * 3584 + (16 * 3584 + 10 * (3584 + 512) + 8 * 18_944) + 3584 * 14
    assert token == 500_736
    left = 80_000_000_000 - int(0.8 * GIB) - int(0.76 * GIB) - 8 * p - 2 * (2 * head + 2 * g) - (2 * head + 8 * g)
    expected = 1024 * int(left / token / 1.25 / 1024)
    assert 8192 < expected < 65_536
    assert asked.spec.learner.micro_batch_tokens == expected
    assert _asked("7B", "h100", 3, learner={"micro_batch_tokens": 9000}).spec.learner.micro_batch_tokens == 9000
    assert _asked("0.6B", "h100", 1).spec.learner.micro_batch_tokens == 65_536
