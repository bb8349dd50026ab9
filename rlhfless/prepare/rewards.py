"""Checks of the rewards before a run."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless.prepare.model import require_name
from rlhfless.prepare.model_weights import Head, weight_problems
from rlhfless.records import Prompt
from rlhfless.rewards import RewardError, checker
from rlhfless.rewards.confinement import protection
from rlhfless.spec import CodeSpec, HttpSpec, LengthPenaltySpec, PythonRewardSpec, RewardModelSpec, RewardSpec, RunSpec
from rlhfless.spec.errors import InputError, Problem, class_and_line


def reward_problems(spec: RunSpec, prompts: Sequence[Prompt]) -> list[Problem]:
    """The reasons for which the rewards could not score samples of these prompts."""
    problems = []
    for index, reward in enumerate(spec.rewards):
        for what in _faults(reward, prompts, spec.scoring.http_hosts):
            problems.append(Problem(f"rewards.{index}", f"reward {reward.label!r}: {what}"))
    return problems


def reward_warnings(spec: RunSpec) -> list[str]:
    """Warnings about rewards that are allowed but doubtful."""
    warnings = []
    for index, reward in enumerate(spec.rewards):
        if isinstance(reward, LengthPenaltySpec) and reward.free_tokens >= spec.generation.max_tokens:
            what = f"no response is longer than free_tokens ({reward.free_tokens}), so it is always 0"
            warnings.append(f"rewards.{index}: {what}")
        if isinstance(reward, CodeSpec):
            warnings += [f"rewards.{index}: {what}" for what in protection().warnings()]
    return warnings


def columns_read(rewards: Sequence[RewardSpec]) -> frozenset[str] | None:
    """Columns of the data set that rewards read; None if a reward gets all columns. By convention of the spec, a key of
    a reward that names a column ends in `_field`."""
    if any(isinstance(reward, PythonRewardSpec | HttpSpec) for reward in rewards):
        return None
    named = [value for reward in rewards for key, value in reward if key.endswith("_field")]
    return frozenset(name for name in named if name is not None)


def _faults(reward: RewardSpec, prompts: Sequence[Prompt], hosts: tuple[str, ...] | None) -> list[str]:
    if isinstance(reward, RewardModelSpec):
        return _model_faults(reward)
    try:
        return checker(reward, hosts).problems(prompts)
    except RewardError as error:
        return [error.what]


def _model_faults(reward: RewardModelSpec) -> list[str]:
    from transformers import AutoConfig

    try:
        require_name(reward.path, "")
    except InputError as error:
        return [f"{problem.what}; {problem.hint}" for problem in error.problems]
    try:
        config = AutoConfig.from_pretrained(reward.path, trust_remote_code=reward.trust_remote_code)
    except Exception as error:  # transformers raises many kinds of error, including network errors
        return [f"cannot read the configuration of {reward.path!r}: {class_and_line(error)}"]
    if config.num_labels != 1:
        return [f"{reward.path!r} has {config.num_labels} labels; a reward model has one, its score"]
    head: Head = "AutoModelForSequenceClassification"
    problems = weight_problems("", reward.path, head, trust_remote_code=reward.trust_remote_code)
    return [f"{reward.path!r}: {problem}" for problem in problems]
