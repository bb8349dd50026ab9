"""Numbers of the learner's ranks side by side."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless.planning.learner_sizes import NO_SIZES, sizes_of
from rlhfless.planning.objects import PlannedCost, PlannedLearner
from rlhfless.planning.prediction import Predicted
from rlhfless.planning.question import Question, edited
from rlhfless.spec import RunSpec


def question(min_ranks: int | None = 1, **contract: Any) -> Question:
    """Two actors, and a learner of four ranks."""
    spec = RunSpec.model_validate(
        {
            "model": {"path": "m"},
            "prompts": {"path": "p.jsonl"},
            "rewards": [{"type": "exact_match"}],
            "steps": 10,
            "placement": {"mode": "disaggregated", "learner_devices": 4},
            "learner": {"ranks": 4, "min_ranks": min_ranks},
        }
        | ({"scaling": {"contract": contract}} if contract else {})
    )
    return Question(spec, None, SimpleNamespace(kind="cpu-core"), 6, 1024, 0)  # type: ignore[arg-type]


def predict(asked: Question) -> tuple[Predicted | None, str | None]:
    """Samples take 10 s, learning 12 s of one device; a device costs 1 USD a second. None for three ranks."""
    ranks = asked.spec.learner.world_size
    assert (asked.spec.placement.learner_devices, asked.count) == (ranks, 2 + ranks)
    if ranks == 3:
        return None, "cannot be cut so"
    step_s = 10 + 12 / ranks
    cost = PlannedCost(
        steps=10, step_s=step_s, wall_s=10 * step_s, wall_low_s=0, wall_high_s=0,
        cost_usd=10 * step_s * asked.count, cost_low_usd=0, cost_high_usd=0,
    )  # fmt: skip
    return Predicted(cost, 1.0, 1.0, {}), None


@pytest.mark.parametrize(
    ("contract", "chosen"),
    [
        ({"type": "cheapest", "deadline_s": 14}, 4),
        ({"type": "cheapest", "deadline_s": 17}, 2),
        ({"type": "cheapest", "deadline_s": 30}, 2),  # 64 USD a step, of 66 and 78
        ({"type": "fastest", "budget_usd": 70}, 2),
        ({"type": "weighted", "time_weight": 1}, 4),
    ],
)
def test_the_number_that_suits_the_contract_is_chosen(contract: dict[str, Any], chosen: int) -> None:
    found = sizes_of(question(**contract), predict)
    rows = [PlannedLearner.model_validate(row) for row in found["learner_sizes"]]
    assert [(row.ranks, row.step_s, row.step_usd) for row in rows] == [(4, 13, 78), (2, 16, 64), (1, 22, 66)]
    assert [row.ranks for row in rows if row.chosen] == [chosen]
    assert found["learner_reason"].startswith(f"{chosen} x cpu-core is chosen by the contract (of a step: ")


def test_another_kind_is_one_of_the_sizes() -> None:
    """Its two devices learn in 3 s, and cost as much as three; the own four are given back."""
    asked = question(None, type="weighted", time_weight=0)
    run = replace(asked, spec=edited(asked.spec, {"placement.learner_elsewhere": {"h100": 2}}))

    def predicted(one: Question) -> tuple[Predicted | None, str | None]:
        placement = one.spec.placement
        if placement.learner_kind is None:
            return predict(one)
        assert (placement.learner_kind, placement.learner_devices, one.spec.learner.ranks, one.count) == (
            "h100", 2, 2, 2,
        )  # fmt: skip
        cost = PlannedCost(
            steps=10, step_s=13, wall_s=130, wall_low_s=0, wall_high_s=0, cost_usd=130 * 5, cost_low_usd=0,
            cost_high_usd=0,
        )  # fmt: skip
        return Predicted(cost, 1.0, 1.0, {}), None

    found = sizes_of(run, predicted)
    rows = [PlannedLearner.model_validate(row) for row in found["learner_sizes"]]
    assert [(row.ranks, row.kind, row.step_usd, row.chosen) for row in rows] == [
        (4, "cpu-core", 78, False),
        (2, "h100", 65, True),
    ]
    assert found["learner_reason"].startswith("2 x h100 is chosen by the contract")


def test_a_learner_of_one_size_has_none() -> None:
    assert sizes_of(question(None), predict) == NO_SIZES
    assert sizes_of(question(4), predict) == NO_SIZES
    assert sizes_of(question(1), lambda _: (None, "no sizes are known")) == NO_SIZES
