"""Schedules side by side: which are refused, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfless.planning.memory_plan import Question
from rlhfless.planning.objects import PlannedCost, PlannedSchedule
from rlhfless.prediction.schedules import schedules_of
from rlhfless.prediction.simulated import Lengths, Predicted, _schedule
from rlhfless.spec import AsyncSpec, OneStepOffSpec, PartialSpec, RunSpec, SyncSpec

VALUES: dict[str, Any] = {
    "model": {"path": "m"},
    "prompts": {"path": "p.jsonl"},
    "rewards": [{"type": "exact_match"}],
    "placement": {"mode": "disaggregated"},
}


def question(**changes: Any) -> Question:
    return Question(RunSpec.model_validate(VALUES | changes), None, None, 2, 1024, 0)  # type: ignore[arg-type]


def predictor(seconds: dict[str, float], shares: dict[str, float]) -> Any:
    """A step of each schedule takes so long, and costs a cent per second."""

    def predict(asked: Question) -> tuple[Predicted, None]:
        schedule = asked.spec.schedule
        step_s = seconds[schedule.type]
        cost = PlannedCost(
            steps=10, step_s=step_s, wall_s=10 * step_s, wall_low_s=0, wall_high_s=0,
            cost_usd=0.1 * step_s, cost_low_usd=0, cost_high_usd=0,
        )  # fmt: skip
        return Predicted(cost, 1.0, 1.0, shares), None

    return predict


LENGTHS = Lengths(300.0, 300.0, 0.5, 100.0, "by hand", known=True)
EVEN = {"generation": 0.5, "learner": 0.48}


SECONDS = {"sync": 10.0, "partial": 8.0, "one_step_off": 6.0, "async": 5.5}


def rows_of(asked: Question, predict: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = schedules_of(asked, predict)["schedules"]
    return rows


def refusals(rows: list[dict[str, Any]]) -> dict[str, str | None]:
    return {row["schedule"]: row["refused"] for row in rows}


def test_schedules_that_save_time_are_shown_with_their_price() -> None:
    rows = rows_of(question(), predictor(SECONDS | {"partial": 9.9}, EVEN))
    assert [(row["schedule"], row["max_staleness"]) for row in rows] == [
        ("sync", 0),
        ("partial", 2),
        ("one_step_off", 1),
        ("async", 2),
    ]
    little = "it saves 1% of a step: the longest responses hold a step up little"
    assert refusals(rows) == dict.fromkeys(SECONDS) | {"partial": little}
    assert rows[2]["step_usd"] == pytest.approx(0.06)
    for row in rows:
        PlannedSchedule.model_validate(row)


def test_overlap_is_refused_where_one_half_takes_the_whole_step() -> None:
    seconds = SECONDS | {"one_step_off": 9.8, "async": 9.0}
    predict = predictor(seconds, {"generation": 0.97, "learner": 0.02})
    rows = rows_of(question(schedule={"type": "async", "max_staleness": 5}), predict)
    found = refusals(rows)
    assert found["one_step_off"] == "it saves 2% of a step: generation alone takes 97% of one with sync"
    assert (found["async"], rows[-1]["max_staleness"]) == (None, 5), "as in the spec"


@pytest.mark.parametrize(
    ("placement", "why"),
    [({"mode": "colocated"}, "share the devices"), ({"mode": "disaggregated", "turns": True}, "take turns")],
)
def test_overlap_is_refused_where_functions_share_devices(placement: dict[str, Any], why: str) -> None:
    found = refusals(rows_of(question(placement=placement), predictor(SECONDS, EVEN)))
    assert [name for name, refused in found.items() if refused and why in refused] == [
        "one_step_off",
        "async",
    ]
    assert found["partial"] is None, "it overlaps nothing"


@pytest.mark.parametrize(
    ("schedule", "chosen"),
    [
        ("sync", "sync"),
        ("one_step_off", "one_step_off"),
        ("async", "async"),
        ("partial", "one_step_off"),  # the spec lets samples get two versions old, and draws in its own order
    ],
)
def test_the_fastest_is_chosen_whose_samples_are_no_older_than_with_the_specs_own(schedule: str, chosen: str) -> None:
    seconds = SECONDS | {"async": 6.5} if schedule == "partial" else SECONDS
    rows = rows_of(question(schedule=schedule), predictor(seconds, EVEN))
    (found,) = [row for row in rows if row["chosen"]]
    assert found["schedule"] == chosen


def test_the_reason_names_contract_bound_refusals_and_what_older_samples_would_bring() -> None:
    """Ten steps of 10 s cost 1 USD, beyond the budget; 5 s are 50 % less than 10."""
    seconds = SECONDS | {"one_step_off": 11.0, "async": 5.0}
    asked = question(steps=10, scaling={"contract": {"type": "fastest", "budget_usd": 0.5, "per": "run"}})
    found = schedules_of(asked, predictor(seconds, {"generation": 0.7, "learner": 0.28}))
    assert found["schedule_reason"] == (
        "sync is chosen by the contract (of a step: fastest for at most 0.05 USD), among schedules "
        "whose samples are at most 0 versions behind, as with schedule.type sync; none of them keeps it; "
        "one_step_off: refused, it costs 10% of a step: generation alone takes 70% of one with sync; schedule.type "
        "async would save 50% of the time, with samples up to 2 versions behind"
    )


@pytest.mark.parametrize(("deadline_s", "chosen"), [(8.5, "partial"), (7.5, "one_step_off")])
def test_the_cheapest_that_keeps_the_deadline_is_chosen(deadline_s: float, chosen: str) -> None:
    """Partial rollouts are made the cheapest, at 8 s a step; the others cost a cent per second."""
    predict = predictor(SECONDS, EVEN)

    def cheaper(asked: Question) -> tuple[Predicted, None]:
        found, none = predict(asked)
        usd = 0.01 if asked.spec.schedule.type == "partial" else found.cost.cost_usd
        return replace(found, cost=found.cost.model_copy(update={"cost_usd": usd})), none

    contract = {"type": "cheapest", "deadline_s": deadline_s}
    asked = question(schedule={"type": "partial", "max_staleness": 1}, steps=10, scaling={"contract": contract})
    assert [row["schedule"] for row in rows_of(asked, cheaper) if row["chosen"]] == [chosen]


def test_what_the_spec_refuses_says_why() -> None:
    found = refusals(rows_of(question(algorithm="dapo"), predictor(SECONDS, EVEN)))
    assert "replaces prompts without signal" in (found["partial"] or "")


def test_without_a_prediction_each_says_why() -> None:
    rows = rows_of(question(), lambda asked: (None, "the model's config.json cannot be read"))
    assert {row["refused"] for row in rows} == {"the model's config.json cannot be read"}
    assert {row["step_s"] for row in rows} == {None}
    assert not any(row["chosen"] for row in rows)


def test_a_prediction_overlaps_only_where_the_learner_has_devices_of_its_own() -> None:
    apart = question(schedule={"type": "async", "max_staleness": 3})
    assert _schedule(apart.spec) == AsyncSpec(max_staleness=3)
    assert _schedule(question(schedule="one_step_off").spec) == OneStepOffSpec()
    together = replace(apart, spec=RunSpec.model_validate(VALUES | {"placement": {"mode": "colocated"}}))
    assert _schedule(together.spec) == SyncSpec()
    partial = question(placement={"mode": "colocated"}, schedule="partial")
    assert _schedule(partial.spec) == PartialSpec(), "which overlaps nothing"
