"""Types of run: each has its own data and keys, and the others' are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless.spec import RunSpec
from rlhfless.spec.explain import explain
from rlhfless.spec.load import load_spec, resolved_yaml
from rlhfless.spec.run import ABSENT, DATA

TYPES = [name for name in DATA if name != "rlhf"]


def values(run_type: str, **changes: Any) -> dict[str, Any]:
    return {"type": run_type, "model": {"path": "m"}, DATA[run_type]: {"path": "/rows.jsonl"}} | changes


def problems(written: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(written)
    return [str(problem) for problem in explain(caught.value, RunSpec, {}, written)]


@pytest.mark.parametrize("run_type", TYPES)
def test_a_spec_with_its_data_alone_is_whole_and_is_read_back_from_its_file(run_type: str, tmp_path: Path) -> None:
    spec = RunSpec.model_validate(values(run_type))
    assert spec.supervised
    assert (spec.data.path, spec.data.section) == ("/rows.jsonl", DATA[run_type])
    assert spec.needs_reference == (run_type == "dpo")
    assert spec.sequences_per_prompt == (1 if run_type == "sft" else 2)
    assert list(spec.trained) == ["learner"]
    (tmp_path / "spec.yaml").write_text(resolved_yaml(spec))
    again = load_spec(tmp_path / "spec.yaml")
    assert again == spec
    assert not {key for key in ABSENT[spec.type] if "." not in key} & set(spec.model_dump())


def test_the_best_checkpoint_is_by_the_held_out_loss_unless_another_is_named() -> None:
    named = {"best": {"metric": "eval/preference_accuracy"}}
    for run_type in TYPES:
        data = {DATA[run_type]: {"path": "/rows.jsonl", "held_out": {"fraction": 0.1}}}
        best = RunSpec.model_validate(values(run_type, checkpoint={"keep_last": 3}, **data)).checkpoint
        assert (best.keep_last, best.best.metric, best.best.mode) == (3, "eval/loss", "min")
        without = RunSpec.model_validate(values(run_type, checkpoint={"keep_last": 3})).checkpoint.best
        assert (without.metric, without.mode) == ("loss", "min")
        other = RunSpec.model_validate(values(run_type, checkpoint=named)).checkpoint.best
        assert (other.metric, other.mode) == ("eval/preference_accuracy", "max")
    assert problems(values("sft", checkpoint=3))[0].startswith("checkpoint: ")
    of_rewards = values("rlhf", rewards=[{"type": "exact_match"}])
    assert RunSpec.model_validate(of_rewards).checkpoint.best.metric == "reward_mean"


@pytest.mark.parametrize(
    ("checkpoint", "evaluation", "held_out", "wanted"),
    [
        ({}, {}, None, ("reward_mean", "max")),
        ({}, {"every_steps": 5}, {"fraction": 0.1}, ("eval/reward_mean", "max")),
        ({}, {"sets": [{"name": "a", "path": "/a.jsonl"}]}, None, ("eval/reward_mean", "max")),
        ({"best": {}}, {}, {"path": "/test.jsonl"}, ("eval/reward_mean", "max")),
        ({"best": {"mode": "min"}}, {}, {"path": "/test.jsonl"}, ("eval/reward_mean", "min")),
        ({"best": {"metric": "policy_loss"}}, {}, None, ("policy_loss", "min")),
        ({"best": {"metric": "value_loss", "mode": "max"}}, {}, None, ("value_loss", "max")),
        ({"best": {"metric": "reward_mean"}}, {}, {"fraction": 0.5}, ("reward_mean", "max")),
    ],
)
def test_the_best_checkpoint_of_a_run_with_rewards_is_by_a_held_out_figure_where_there_is_one(
    checkpoint: Any, evaluation: Any, held_out: Any, wanted: Any
) -> None:
    written = values("rlhf", rewards=[{"type": "exact_match"}], checkpoint=checkpoint, evaluation=evaluation)
    written["prompts"] = {"path": "/rows.jsonl", "held_out": held_out}
    spec = RunSpec.model_validate(written)
    assert (spec.checkpoint.best.metric, spec.checkpoint.best.mode) == wanted
    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("run_type", "key", "value", "having"),
    [
        ("sft", "generation", {"max_tokens": 9}, "rlhf"),
        ("sft", "rewards", [{"type": "exact_match"}], "rlhf"),
        ("sft", "preferences", {"path": "p"}, "reward_model and dpo"),
        ("sft", "reference", {"ranks": 2}, "rlhf and dpo"),
        ("reward_model", "dpo", {"beta": 1}, "dpo"),
        ("reward_model", "learner", {"logits_mib": 1}, "rlhf and sft and dpo"),
        ("dpo", "samples_per_prompt", 8, "rlhf"),
        ("dpo", "scaling", {"generation": {"min_actors": 2}}, "rlhf"),
    ],
)
def test_a_key_of_another_type_is_refused_even_at_its_default(run_type: str, key: str, value: Any, having: str) -> None:
    (message,) = problems(values(run_type, **{key: value}))
    assert message.startswith(key)
    assert f"a run of type {run_type} has no such key" in message
    assert message.endswith(f"it is of {having}")


def test_what_a_type_needs_is_named() -> None:
    (message,) = problems({"type": "dpo", "model": {"path": "m"}})
    assert message.startswith("preferences: missing")
    (message,) = problems({"type": "ppo", "model": {"path": "m"}})
    assert "'ppo'" in message
    (message,) = problems(values("sft", placement={"mode": "disaggregated"}))
    assert message.startswith("placement.mode: a run of type sft has no generation")


def test_the_sizes_of_pairs_are_bounded() -> None:
    held_out = {"path": "/rows.jsonl", "held_out": {"fraction": 0.1, "max_prompts": 40_000}}
    told = problems(values("dpo", prompts_per_step=40_000, preferences=held_out))
    assert told[0].startswith("prompts_per_step: prompts_per_step (40,000) x 2 response(s) is 80,000, above")
    assert told[1].startswith("preferences.held_out.max_prompts: ")
