"""The section `critic`: who needs it, and what it may start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless.spec import RunSpec
from rlhfless.spec.load import load_spec

SMALL: dict[str, Any] = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
SCORED = {"type": "reward_model", "path": "r"}


def spec(**changes: Any) -> RunSpec:
    return RunSpec.model_validate(SMALL | {"algorithm": "ppo"} | changes)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, ["ppo needs the values of a critic", "add `critic: {}`"]),
        ({"algorithm": "grpo", "critic": {}}, ["grpo uses no values", "leave `critic` out"]),
        ({"critic": {"model": "reward_model"}}, ["critic.model is reward_model", "0 rewards of type reward_model"]),
        (
            {"critic": {"model": "reward_model"}, "rewards": [SCORED, SCORED | {"name": "other"}]},
            ["2 rewards of type reward_model", "name the folder of one"],
        ),
        ({"critic": {"warm_up_steps": 100}}, ["critic.warm_up_steps is 100", "the run has 100 steps"]),
        ({"critic": {"learning_rate": 1e-4}}, ["learning_rate"]),
        ({"critic": {"ranks": 6, "shard_ranks": 4}}, ["shard_ranks is 4", "set it to 3"]),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        spec(**changes)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_what_it_starts_from() -> None:
    assert spec(critic={}).critic_source.path == "m"
    assert spec(critic={}).critic_source.tokenizer == "m"
    assert spec(critic={"model": "c"}).critic_source.path == "c"
    run = spec(critic={"model": "reward_model"}, rewards=[SCORED], model={"path": "m", "tokenizer": "t"})
    assert (run.critic_source.path, run.critic_source.tokenizer) == ("r", "t")


def test_it_warms_up_before_the_policy_learns() -> None:
    run = spec(critic={"warm_up_steps": 2})
    assert [run.updates_policy(step) for step in (1, 2, 3)] == [False, False, True]
    assert RunSpec.model_validate(SMALL).updates_policy(1)


def test_its_learning_rate_is_its_own() -> None:
    run = spec(critic={"optimizer": {"weight_decay": 0.0}}, optimizer={"learning_rate": 3e-6})
    assert run.critic is not None
    assert (run.critic.optimizer.learning_rate, run.optimizer.learning_rate) == (1e-5, 3e-6)


def test_a_folder_counts_from_the_specs_folder_and_a_keyword_is_none(tmp_path: Path) -> None:
    for name in ("policy", "mine"):  # a folder that is called as the keyword
        (tmp_path / name).mkdir()
    file = tmp_path / "run.yaml"
    text = (
        "model: {path: m}\nprompts: {path: p}\nrewards: [{type: exact_match}]\nalgorithm: ppo\ncritic: {model: MODEL}\n"
    )
    for model, expected in (("mine", str(tmp_path / "mine")), ("policy", "policy")):
        file.write_text(text.replace("MODEL", model))
        critic = load_spec(file).critic
        assert critic is not None
        assert critic.model == expected
