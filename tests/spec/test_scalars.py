"""`true` is no number, and 1 is not `true`: neither is converted to the other without a word."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless.control.api.app import problems_of
from rlhfless.control.api.compute import CompareQuestion
from rlhfless.scaling.prices import Owned
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import SpecError
from rlhfless.spec.explain import explain
from rlhfless.spec.load import load_values

SMALL: dict[str, Any] = {
    "model": {"path": "m"},
    "prompts": {"path": "/rows.jsonl"},
    "rewards": [{"type": "exact_match"}],
}


def problems(written: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(written)
    return [str(problem) for problem in explain(caught.value, RunSpec, {}, written)]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"generation": {"max_tokens": True}}, "generation.max_tokens"),
        ({"generation": {"temperature": True}}, "generation.temperature"),
        ({"generation": {"stop_token_ids": [1, True]}}, "generation.stop_token_ids.1"),
        ({"steps": True}, "steps"),
        ({"seed": False}, "seed"),
        ({"evaluation": {"pass_at": [True]}}, "evaluation.pass_at.0"),
        ({"evaluation": {"every_steps": True}}, "evaluation.every_steps"),
        ({"rewards": [{"type": "exact_match", "weight": True}]}, "rewards.0.weight"),
        ({"scaling": {"generation": {"max_actors": True}}}, "scaling.generation.max_actors"),
        ({"learner": {"ranks": True}}, "learner.ranks"),
        ({"limits": {"max_cost_usd": True}}, "limits.max_cost_usd"),
        ({"sizes": {"steps": True}}, "sizes.steps"),
        ({"optimizer": {"learning_rate": False}}, "optimizer.learning_rate"),
    ],
)
def test_true_is_no_number(changes: dict[str, Any], where: str) -> None:
    (message,) = problems(SMALL | changes)
    assert message.startswith(f"{where}: ")
    assert "should be a number, not true or false" in message


@pytest.mark.parametrize("value", [0, 1, 1.0, 0.0])
def test_a_number_is_not_true(value: float) -> None:
    (message,) = problems(SMALL | {"prompts": {"path": "/rows.jsonl", "shuffle": value}})
    assert message == f"prompts.shuffle: {value!r}: should be true or false"


def test_numbers_without_a_fraction_are_whole_however_they_are_written() -> None:
    assert RunSpec.model_validate(SMALL | {"steps": 1e3, "optimizer": {"learning_rate": 1}}).steps == 1000
    (message,) = problems(SMALL | {"steps": 10.5})
    assert message.startswith("steps: 10.5: ")


def test_all_wrong_values_of_a_section_are_named_and_so_are_its_sections() -> None:
    told = problems(SMALL | {"generation": {"max_tokens": True, "top_k": False}, "learner": {"ranks": True}})
    assert [text.partition(":")[0] for text in told] == ["generation.max_tokens", "generation.top_k", "learner.ranks"]


def test_set_on_the_command_line_is_checked_alike(tmp_path: Any) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\nprompts: {path: p.jsonl}\nrewards: [{type: exact_match}]\n")
    with pytest.raises(SpecError, match=r"steps .--set steps=true.: True: should be a number, not true or false"):
        load_values(file, ["steps=true"])


def test_bodies_and_price_books_are_checked_alike() -> None:
    with pytest.raises(ValidationError) as caught:
        CompareQuestion.model_validate({"spec": SMALL, "deadline_s": True})
    (error,) = caught.value.errors()
    (problem,) = problems_of(error | {"loc": ("body",)}, "application/json")
    assert (problem.where, problem.what) == ("deadline_s", "True: should be a number, not true or false")
    with pytest.raises(ValidationError, match="should be a number"):
        Owned.model_validate({"released_value": True})
