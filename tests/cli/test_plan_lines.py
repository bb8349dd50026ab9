"""The plan on a terminal: reasons below the table, and one figure for the run's own schedule."""

from __future__ import annotations

import io
from typing import Any

import pytest

from rlhfless.cli.plan_tables import devices_lines, schedules_lines
from rlhfless.planning.objects import PlannedCost, PlannedDevices, PlannedSchedule
from rlhfless.planning.suggestions import Question
from rlhfless.prediction.run_plan import Planner
from rlhfless.prediction.simulated import Lengths, Predicted
from rlhfless.spec import RunSpec
from rlhfless.telemetry.terminal import Terminal

WHY = "it costs 16% of a step: the longest responses hold a step up little"
VALUES: dict[str, Any] = {
    "model": {"path": "m"},
    "prompts": {"path": "p.jsonl"},
    "rewards": [{"type": "exact_match"}],
}


def lines(content: object, columns: int = 80) -> list[str]:
    stream = io.StringIO()
    Terminal(file=stream, width=columns, force_terminal=True, color_system=None).print(content)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def schedule(name: str, refused: str | None = None, chosen: bool = False) -> PlannedSchedule:
    return PlannedSchedule(
        schedule=name, max_staleness=0, step_s=65.39, step_usd=0.0021, wall_s=1308.0, cost_usd=0.0417,
        refused=refused, chosen=chosen,
    )  # fmt: skip


def test_reasons_of_schedules_are_lines_of_their_own() -> None:
    rows = [schedule("sync", chosen=True), schedule("one_step_off", WHY), schedule("async", WHY)]
    shown = lines(schedules_lines(rows, "sync is chosen"))
    assert shown[2].split()[-1] == "refused"
    assert " ".join(shown[4:]) == f"refused: one_step_off and async: {WHY} sync is chosen"


def test_why_a_run_does_not_fit_is_a_line_of_its_own() -> None:
    row = PlannedDevices(
        kind="h100", count=8, placement="colocated", fits=False, problems=["it " + "needs more " * 20], predicted=None,
        nearest_change="learner.ranks: 8", costs_usd={}, reason=None, no_engine=None,
    )  # fmt: skip
    assert lines(devices_lines([row]))[2:] == ["8 x h100: does not fit; learner.ranks: 8"]


@pytest.mark.parametrize(("planned_s", "planned_usd"), [(61.33, 0.0391), (65.39, 0.0417), (1.0, 1e-9)])
def test_the_runs_own_schedule_has_one_figure(
    monkeypatch: pytest.MonkeyPatch, planned_s: float, planned_usd: float
) -> None:
    """Schedules are compared by quick predictions, here of 65.39 s and of 60.07 s: the plan's own figure of the first
    stands for both, and the second keeps its ratio."""
    seconds = {"sync": 65.39, "partial": 60.07}

    def quick(self: Planner, asked: Question) -> tuple[Predicted, None]:
        step_s = seconds.get(asked.spec.schedule.type, 80.0)
        cost = PlannedCost(
            steps=20, step_s=step_s, wall_s=20 * step_s, wall_low_s=0, wall_high_s=0,
            cost_usd=0.01 * step_s, cost_low_usd=0, cost_high_usd=0,
        )  # fmt: skip
        return Predicted(cost, 1.0, 1.0, {"generation": 0.5, "learner": 0.4}), None

    monkeypatch.setattr(Planner, "predicted", quick)
    spec = RunSpec.model_validate(VALUES)
    asked = Question(spec, None, None, 2, 1024, 0)  # type: ignore[arg-type]
    planner = Planner(spec, found_lengths=Lengths(300.0, 300.0, 0.5, 100.0, "by hand", known=True))
    row = {"fits": True, "predicted": {"step_s": planned_s, "cost_usd": planned_usd}}
    found = {each["schedule"]: each for each in planner.schedules(asked, row)["schedules"]}
    assert found["sync"]["step_s"] == pytest.approx(planned_s)
    assert found["sync"]["cost_usd"] == pytest.approx(planned_usd)
    assert found["partial"]["step_s"] == pytest.approx(planned_s * 60.07 / 65.39)
    assert found["sync"]["wall_s"] == pytest.approx(20 * planned_s)
