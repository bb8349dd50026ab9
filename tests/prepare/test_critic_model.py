"""The model that a critic starts from, judged by its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from fakes.tiny_learner import save_tiny_critic, save_tiny_model
from rlhfless.prepare.model import PolicyModel, TokenizerInfo, critic_problems
from rlhfless.spec import RunSpec


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PolicyModel]:
    path = save_tiny_model(tmp_path_factory.mktemp("models") / "policy")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    return path, PolicyModel(tokenizer, TokenizerInfo(path, len(tokenizer), 0, 0), None, None, ())


def problems(policy: tuple[str, PolicyModel], model: str) -> list[str]:
    path, read = policy
    values = {"model": {"path": path}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
    spec = RunSpec.model_validate(values | {"algorithm": "ppo", "critic": {"model": model}})
    return [str(problem) for problem in critic_problems(spec, read)]


def critic(policy: tuple[str, PolicyModel], folder: Path, labels: int = 1, words: int = 40) -> str:
    save_tiny_critic(policy[0], folder, labels)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(policy[0])
    if words != 40:
        tokenizer.add_tokens(["other"])
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_policy_itself_and_a_critic_of_its_family_are_right(policy, tmp_path) -> None:
    assert problems(policy, "policy") == []
    assert problems(policy, critic(policy, tmp_path / "critic")) == []


def test_what_is_wrong_is_named(policy, tmp_path) -> None:
    (labels,) = problems(policy, critic(policy, tmp_path / "labels", labels=3))
    assert "critic.model" in labels
    assert "has 3 labels; a critic has one" in labels
    (tokens,) = problems(policy, critic(policy, tmp_path / "tokens", words=41))
    assert "reads other tokens than the policy" in tokens
    (missing,) = problems(policy, str(tmp_path / "nowhere"))
    assert "critic.model" in missing
    assert "no such folder" in missing


def test_damaged_weights_are_found(policy, tmp_path) -> None:
    folder = critic(policy, tmp_path / "critic")
    weights = Path(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (fault,) = problems(policy, folder)
    assert fault.startswith("critic.model")
