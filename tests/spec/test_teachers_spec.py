"""Teachers in a spec: which combinations are refused, and the functions that they become."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless.records import FunctionRole
from rlhfless.scaling.function_specs import kinds_of
from rlhfless.spec import RunSpec

TEACHER = {"name": "big", "path": "y"}
DISTILL: dict[str, Any] = {
    "model": {"path": "x"},
    "prompts": {"path": "p"},
    "algorithm": "distill",
    "teachers": [TEACHER],
}
MIXTURE = {"mixture": [{"name": "math", "path": "m", "weight": 1}, {"name": "code", "path": "c", "weight": 1}]}


def spec(**changes: Any) -> RunSpec:
    return RunSpec.model_validate(DISTILL | changes)


def test_distillation_alone_needs_no_reward_and_no_scoring() -> None:
    assert [kind.name for kind in kinds_of(spec())] == ["generation", "learner", "teacher_big"]
    assert spec().algorithm.needs.samples_per_prompt == 1


def test_a_teacher_is_a_function_like_the_reference() -> None:
    run = spec(algorithm={"type": "distill", "kl": {"coefficient": 0.1}}, teachers=[TEACHER | {"ranks": 2}])
    kinds = {kind.name: kind for kind in kinds_of(run)}
    teacher, reference = kinds["teacher_big"], kinds["reference"]
    assert (teacher.role, teacher.deployment) == (FunctionRole.ANNOTATES, reference.deployment)
    assert teacher.worker == "rlhfless.functions.shares:FrozenTeacher"
    assert teacher.bounds(run) == reference.bounds(run)
    wanted = teacher.wanted(run)
    assert wanted is not None
    assert (wanted.ranks, wanted.ranks_key) == (2, "teachers.0.ranks")
    assert (teacher.model(run.model).path, reference.model(run.model).path) == ("y", "x")


def test_the_model_itself_can_teach() -> None:
    run = spec(teachers=[{"name": "hinted", "path": "self", "prompt_field": "hint"}])
    (teacher,) = (kind for kind in kinds_of(run) if kind.name == "teacher_hinted")
    assert teacher.model(run.model) == run.model


def test_any_algorithm_can_add_the_term() -> None:
    rewards = [{"type": "exact_match"}]
    run = spec(algorithm={"type": "grpo", "distill": {"coefficient": 0.5}}, rewards=rewards)
    assert run.algorithm.needs.teachers
    assert run.algorithm.needs.rewards
    assert run.algorithm.needs.old_logprobs
    assert not spec(algorithm={"type": "distill", "distill": {"student": "rollout"}}).algorithm.needs.old_logprobs


def test_sets_have_teachers_of_their_own() -> None:
    run = spec(prompts=MIXTURE, teachers=[TEACHER | {"sets": ["math"]}, {"name": "other", "path": "z"}])
    big, other = (kind for kind in kinds_of(run) if kind.role is FunctionRole.ANNOTATES)
    assert [big.computes(name) for name in ("math", "code")] == [True, False]
    assert [other.computes(name) for name in ("math", "code")] == [True, True]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"teachers": []}, "distill learns from `teachers`, and there are none"),
        ({"algorithm": "grpo", "rewards": [{"type": "exact_match"}]}, "grpo does not learn from them"),
        ({"algorithm": {"type": "grpo", "distill": {"coefficient": 0.5}}}, "Field required"),
        ({"teachers": [TEACHER, TEACHER]}, "two teachers are called 'big'"),
        ({"teachers": [TEACHER | {"sets": ["maths"]}], "prompts": MIXTURE}, "has 'maths', which no training set is"),
        ({"teachers": [{"name": "big"}]}, "teacher 'big' has neither path nor url"),
        ({"teachers": [TEACHER | {"url": "http://t:1"}]}, "teacher 'big' has both path and url"),
        ({"teachers": [{"name": "b", "url": "http://u:p@t:1"}]}, "a user or a password"),
        ({"teachers": [{"name": "b", "url": "http://t:1"}], "generation": {"temperature": 0.7}}, "temperature 1"),
        ({"teachers": [{"name": "b", "url": "http://t:1", "timeout_s": 600}]}, r"below timeouts.call_s \(600\)"),
        ({"teachers": [TEACHER | {"weight": 0}]}, "greater than 0"),
        ({"teachers": [TEACHER | {"rank": 2}]}, "rank"),
        ({"algorithm": {"type": "distill", "distill": {"coefficient": 0}}}, "greater than 0"),
        ({"algorithm": {"type": "distill", "kl": {"coefficient": 1, "where": "reward"}}}, "learns from no reward"),
        ({"functions": {"teacher_x": {"type": "second_policy.kind:SecondPolicy"}}}, "functions"),
    ],
)
def test_what_excludes_each_other_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        spec(**changes)
