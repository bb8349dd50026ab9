"""What a resumed run may change, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfless.spec import CriticSpec, EnvironmentSpec, RunSpec, TeacherSpec
from rlhfless.spec.errors import InputError
from rlhfless.spec.load import MAY_DIFFER, check_resumable, differences
from rlhfless.spec.teachers import MOST_TEACHERS

VALUES: dict[str, Any] = {
    "model": {"path": "m"},
    "prompts": {"path": "p"},
    "rewards": [{"type": "exact_match"}, {"type": "length_penalty", "free_tokens": 3, "max_tokens": 5}],
}
SPEC = RunSpec.model_validate(VALUES)


def changed(**changes: Any) -> RunSpec:
    return RunSpec.model_validate(VALUES | changes)


def test_length_fleet_and_prices_may_change() -> None:
    now = changed(
        steps=5,
        scaling={"generation": {"max_actors": 4}, "prices": "mine.yaml"},
        generation={"engine": {"max_sequences": 3}},
        timeouts={"call_s": 400},
    )
    check_resumable(SPEC, now, "new.yaml")
    assert len(differences(SPEC, now)) == 5


@pytest.mark.parametrize(
    ("changes", "field", "values"),
    [
        ({"seed": 1}, "seed", "1, but the run started with 0"),
        ({"generation": {"temperature": 0.5}}, "generation.temperature", "0.5, but the run started with 1.0"),
        ({"rewards": VALUES["rewards"][:1]}, "rewards.1.free_tokens", "None, but the run started with 3"),
        ({"prompts": {"path": "p", "held_out": {"fraction": 0.5}}}, "prompts.held_out.fraction", "0.5, but"),
        ({"optimizer": {"betas": [0.9, 0.5]}}, "optimizer.betas.1", "0.5, but the run started with"),
    ],
)
def test_what_makes_another_run_is_refused_by_name(changes: dict[str, Any], field: str, values: str) -> None:
    with pytest.raises(InputError) as caught:
        check_resumable(SPEC, changed(**changes), "new.yaml")
    assert "new.yaml cannot resume this run" in str(caught.value)
    assert f"- {field}: {values}" in str(caught.value)


def test_every_name_is_a_field() -> None:
    environment, teacher = EnvironmentSpec(type="my_env:Guess"), TeacherSpec(name="big", path="big")
    sections = {"critic": CriticSpec(), "environment": environment, "teachers": (teacher,) * MOST_TEACHERS}
    with_all = SPEC.model_copy(update=sections)
    for name in MAY_DIFFER:
        value: Any = with_all
        for part in name.split("."):
            value = value[int(part)] if part.isdigit() else getattr(value, part)
