"""Sets of prompts, and the rewards that are for them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless.spec import RunSpec

MATH, CODE = {"name": "math", "path": "/math.jsonl", "weight": 3}, {"name": "code", "path": "/code.jsonl"}
EXACT, REGEX = {"type": "exact_match", "sets": ["math"]}, {"type": "regex", "pattern": "x", "sets": ["code"]}


def spec(prompts: dict[str, Any], rewards: list[dict[str, Any]], **changes: Any) -> RunSpec:
    return RunSpec.model_validate({"model": {"path": "/m"}, "prompts": prompts, "rewards": rewards} | changes)


def test_a_mixture_with_rewards_of_its_sets() -> None:
    given = spec({"mixture": [MATH, CODE]}, [EXACT, REGEX])
    assert given.prompts.weights == {"math": 3, "code": 1}
    assert [part.scores("code") for part in given.rewards] == [False, True]


@pytest.mark.parametrize(
    ("prompts", "rewards", "changes", "told"),
    [
        ({}, [EXACT], {}, "give exactly one of `path` and `mixture`"),
        ({"path": "/a.jsonl", "mixture": [MATH]}, [EXACT], {}, "give exactly one of `path` and `mixture`"),
        ({"mixture": [MATH, MATH]}, [EXACT], {}, "two sets are called 'math'"),
        ({"mixture": [MATH]}, [EXACT | {"sets": ["maths"]}], {}, r"rewards.0.sets has 'maths'.*did you mean `math`"),
        ({"mixture": [MATH, CODE]}, [EXACT], {}, "no reward is for the set 'code'"),
        ({"path": "/a.jsonl"}, [EXACT], {"evaluation": {"sets": [MATH | {"weight": 1}]}}, "weight"),
        (
            {"path": "/a.jsonl"},
            [EXACT],
            {"evaluation": {"sets": [{"name": "math", "path": "/math.jsonl"}]}},
            "no reward is for the training prompts, which have no set",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    prompts: dict[str, Any], rewards: list[dict[str, Any]], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        spec(prompts, rewards, **changes)
