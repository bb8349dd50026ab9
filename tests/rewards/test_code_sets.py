"""Rewards from the columns of the field's data sets: small made files, each with right and wrong programs."""

import json
from pathlib import Path

import pytest

from fakes.builders import code_value
from rlhfless.records import Prompt
from rlhfless.rewards.code import CodeReward
from rlhfless.spec import CodeSpec

SETS = {
    "apps": {"tests_field": "input_output"},
    "livecodebench": {"tests_field": ("public_test_cases", "private_test_cases")},
    "humaneval": {"tests_field": "test"},
    "mbpp": {"tests_field": ("test_list", "challenge_test_list")},
    "pytest": {"tests_field": "test"},
    "unittest": {"tests_field": "test", "prompt_field": "complete_prompt"},
    "verl": {"tests_field": "reward_model.ground_truth"},
    "others": {},
}


def rows(name):
    lines = (Path(__file__).parent / "code_sets" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def cases():
    for name, options in SETS.items():
        for number, row in enumerate(rows(name), 1):
            right, wrong = row.pop("right"), row.pop("wrong")
            for index, (program, wanted) in enumerate([*((p, 1.0) for p in right), *((p, 0.0) for p in wrong)], 1):
                yield pytest.param(options, row, program, wanted, id=f"{name}:{number}:{index}")


@pytest.mark.parametrize(("options", "row", "program", "wanted"), cases())
def test_right_programs_get_1_and_wrong_ones_0(options, row, program, wanted):
    assert code_value(program, row, **options) == wanted


@pytest.mark.parametrize("name", SETS)
def test_the_sets_are_taken_before_a_run(name):
    options = SETS[name] | ({"solution_field": "canonical_solution"} if name == "humaneval" else {})
    prompts = [Prompt(str(i), (1,), "text", row) for i, row in enumerate(rows(name))]
    assert CodeReward(CodeSpec(type="code", **options)).problems(prompts) == []
