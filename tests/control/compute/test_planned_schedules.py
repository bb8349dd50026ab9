"""Schedules side by side: which are refused, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfless.control.compute import prediction
from rlhfless.control.compute.prediction import Lengths, Predicted, _schedule
from rlhfless.control.compute.rollouts import Rollouts
from rlhfless.control.compute.schedules import schedules_of
from rlhfless.control.objects.costs import PlannedCost, PlannedSchedule
from rlhfless.prepare.memory.changes import Question
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
        step_s = seconds["streaming" if schedule.streaming else schedule.type]
        cost = PlannedCost(
            steps=10, step_s=step_s, wall_s=10 * step_s, wall_low_s=0, wall_high_s=0,
            cost_usd=0.1 * step_s, cost_low_usd=0, cost_high_usd=0,
        )  # fmt: skip
        return Predicted(cost, 1.0, 1.0, shares), None

    return predict


LENGTHS = Lengths(300.0, 300.0, 0.5, 100.0, "by hand", known=True)
EVEN = {"generation": 0.5, "learner": 0.48}


SECONDS = {"sync": 10.0, "streaming": 7.0, "partial": 8.0, "tail_batching": 9.9, "one_step_off": 6.0, "async": 5.5}


def refusals(rows: list[dict[str, Any]]) -> dict[str, str | None]:
    return {"streaming" if row["streaming"] else row["schedule"]: row["refused"] for row in rows}


def test_schedules_that_save_time_are_shown_with_their_price() -> None:
    rows = schedules_of(question(), predictor(SECONDS, EVEN))
    assert [(row["schedule"], row["streaming"], row["max_staleness"]) for row in rows] == [
        ("sync", False, 0),
        ("sync", True, 0),
        ("partial", False, 2),
        ("tail_batching", False, 0),
        ("one_step_off", False, 1),
        ("async", False, 2),
    ]
    little = "it saves 1% of a step: the longest responses hold a step up little"
    assert refusals(rows) == dict.fromkeys(SECONDS) | {"tail_batching": little}
    assert rows[4]["step_usd"] == pytest.approx(0.06)
    for row in rows:
        PlannedSchedule.model_validate(row)


def test_overlap_is_refused_where_one_half_takes_the_whole_step() -> None:
    seconds = SECONDS | {"streaming": 9.9, "one_step_off": 9.8, "async": 9.0}
    predict = predictor(seconds, {"generation": 0.97, "learner": 0.02})
    rows = schedules_of(question(schedule={"type": "async", "max_staleness": 5}), predict)
    found = refusals(rows)
    assert found["streaming"] == "it saves 1% of a step: generation alone takes 97% of one with sync"
    assert found["one_step_off"] == "it saves 2% of a step: generation alone takes 97% of one with sync"
    assert (found["async"], rows[-1]["max_staleness"]) == (None, 5), "as in the spec"


@pytest.mark.parametrize(
    ("placement", "why"),
    [({"mode": "colocated"}, "share the devices"), ({"mode": "disaggregated", "turns": True}, "take turns")],
)
def test_overlap_is_refused_where_functions_share_devices(placement: dict[str, Any], why: str) -> None:
    found = refusals(schedules_of(question(placement=placement), predictor(SECONDS, EVEN)))
    assert [name for name, refused in found.items() if refused and why in refused] == [
        "streaming",
        "one_step_off",
        "async",
    ]
    assert found["partial"] is None, "it overlaps nothing"


def test_streaming_is_refused_where_the_algorithm_needs_the_whole_batch() -> None:
    found = refusals(schedules_of(question(algorithm="reinforce_plus_plus"), predictor(SECONDS, EVEN)))
    assert "reinforce_plus_plus computes advantages or its loss from the whole batch" in (found["streaming"] or "")


def test_what_the_spec_refuses_says_why() -> None:
    found = refusals(schedules_of(question(algorithm="dapo"), predictor(SECONDS, EVEN)))
    for name in ("partial", "tail_batching"):
        assert "draws other prompts in place of those without signal" in (found[name] or "")


def test_without_a_prediction_each_says_why() -> None:
    rows = schedules_of(question(), lambda asked: (None, "the model's config.json cannot be read"))
    assert {row["refused"] for row in rows} == {"the model's config.json cannot be read"}
    assert {row["step_s"] for row in rows} == {None}


def test_a_prediction_overlaps_only_where_the_learner_has_devices_of_its_own() -> None:
    apart = question(schedule={"type": "async", "max_staleness": 3})
    assert _schedule(apart.spec) == AsyncSpec(max_staleness=3)
    assert _schedule(question(schedule="one_step_off").spec) == OneStepOffSpec()
    together = replace(apart, spec=RunSpec.model_validate(VALUES | {"placement": {"mode": "colocated"}}))
    assert _schedule(together.spec) == SyncSpec()
    streaming = {"type": "sync", "streaming": True}
    assert _schedule(question(schedule=streaming).spec) == SyncSpec(streaming=True)
    assert _schedule(question(schedule=streaming, mini_batches=2).spec) == SyncSpec()
    partial = question(placement={"mode": "colocated"}, schedule="partial")
    assert _schedule(partial.spec) == PartialSpec(), "which overlaps nothing"


@pytest.mark.parametrize(("ahead_s", "chosen"), [(9.7, "one_step_off"), (9.8, "sync"), (11.0, "sync")])
def test_a_run_that_chooses_is_predicted_as_what_it_would_choose(
    ahead_s: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wants to save 3 % of 10 s. Both ways are predicted with the rollouts that are asked for."""
    fp8, seconds = Rollouts("sglang", "fp8"), {"sync": 10.0, "one_step_off": ahead_s}
    predict, tried = predictor(seconds, EVEN), []
    whole = prediction.predicted

    def one(asked: Question, *rest: Any, quick: bool) -> Predicted:
        tried.append((asked.spec.schedule.type, *rest, quick))
        found: Predicted = predict(asked)[0]
        return found

    monkeypatch.setattr(prediction, "predicted", one)
    found = whole(question(schedule="auto"), {}, LENGTHS, None, fp8, quick=True)
    assert found.cost.step_s == seconds[chosen]
    assert tried == [(schedule, {}, LENGTHS, None, fp8, True) for schedule in seconds]
