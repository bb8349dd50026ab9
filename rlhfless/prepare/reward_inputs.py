"""What each reward gets of a prompt, as it uses it: to look at before a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlhfless.prepare.rewards import reward_problems
from rlhfless.records import Prompt
from rlhfless.records.fields import find_field
from rlhfless.rewards.answers import answer_of
from rlhfless.rewards.code_tests import Test, tests_of
from rlhfless.rewards.mathematics import MathReward
from rlhfless.rewards.protocol import Unscorable
from rlhfless.spec import (
    CodeSpec,
    ExactMatchSpec,
    HttpSpec,
    JsonSchemaSpec,
    MathSpec,
    PythonRewardSpec,
    RegexSpec,
    RewardModelSpec,
    RewardSpec,
    RunSpec,
)


@dataclass(frozen=True, slots=True)
class RewardInput:
    """What one reward gets besides the response."""

    reward: str
    kind: str
    weight: float
    gets: Mapping[str, Any]
    """By name: `expected`, `tests`, `schema`, `columns` or `prompt`; empty for a reward of the response alone."""
    problems: tuple[str, ...] = ()
    """Why it cannot score this prompt."""


def reward_inputs(spec: RunSpec, prompt: Prompt) -> Iterator[RewardInput]:
    """What the rewards of a spec get of a prompt; only those that score its set."""
    problems = reward_problems(spec, [prompt])
    for index, reward in enumerate(spec.rewards):
        if not reward.scores(prompt.source):
            continue
        own = [problem.what for problem in problems if problem.where == f"rewards.{index}"]
        try:
            gets = gets_of(reward, prompt)
            if isinstance(reward, MathSpec):
                gets = {**gets, "read as": MathReward(reward).read(gets["expected"])}
        except Unscorable as error:
            gets, own = {}, own or [str(error)]
        yield RewardInput(reward.label, reward.type, reward.weight, gets, tuple(own))


def gets_of(reward: RewardSpec, prompt: Prompt) -> Mapping[str, Any]:
    """What a reward gets of a prompt: see RewardInput. Raises Unscorable."""
    match reward:
        case ExactMatchSpec():
            expected = answer_of(prompt.columns, reward)
            expected = expected.strip() if reward.strip else expected
            return {"expected": expected.casefold() if reward.ignore_case else expected}
        case RegexSpec(answer_field=str()):
            return {"expected": answer_of(prompt.columns, reward).strip()}
        case MathSpec():
            return {"expected": answer_of(prompt.columns, reward)}
        case CodeSpec():
            tests = tests_of(prompt.columns, reward)[: reward.max_tests]
            return {"tests": [_test(test) for test in tests]}
        case JsonSchemaSpec(schema_field=None):
            return {"schema": reward.json_schema}
        case JsonSchemaSpec(schema_field=str() as field):
            return {"schema": _parsed(find_field(prompt.columns, field))}
        case RewardModelSpec(prompt_field=str() as field):
            return {"prompt": find_field(prompt.columns, field)}
        case RewardModelSpec():
            return {"prompt": prompt.text}
        case PythonRewardSpec() | HttpSpec():
            return {"prompt": prompt.text, "columns": dict(prompt.columns)}
        case _:
            return {}


def _test(test: Test) -> dict[str, Any]:
    """A test as JSON values; `function` only where it has one."""
    return {name: value for name, value in asdict(test).items() if value or name != "function"}


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
