"""Models of use start with the defaults, or the hint names edits of the user's own spec with which they do."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from rlhfless.prepare.memory.changes import nearest_change
from rlhfless.prepare.memory.question import Question, edited
from rlhfless.prepare.memory.settled import BATCH_SEQUENCES, placed, settled
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
    given = settled(RunSpec.model_validate(BASE | parts), kind)
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
        ("32B", 8, {"placement.turns": True, "optimizer.moment_bits": 8}),
        ("32B", 16, {"placement.turns": False, "generation.engine.tensor_parallel_size": 4}),
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


def test_what_the_user_has_set_stays() -> None:
    chosen = {"generation": {"engine": {"tensor_parallel_size": 1}}, "optimizer": {"moment_bits": 32}}
    asked = _asked("32B", "h100", 16, **chosen)
    assert asked.spec.generation.engine.tensor_parallel_size == 1
    assert asked.spec.optimizers["learner"].moment_bits == 32
    assert not _asked("3B", "h100", 1, placement={"turns": False}).spec.placement.turns
    overlapping = _asked("7B", "h100", 2, schedule={"type": "one_step_off"})
    assert not overlapping.spec.placement.in_turns, "nothing would overlap in turns"


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
    assert (chosen.max_sequences, chosen.max_batch_tokens) == (64, 8192)
