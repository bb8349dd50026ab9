"""The band of a prediction from an earlier run: by hand, and by how often simulated runs end within it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfless.planning.objects import PlannedCost
from rlhfless.planning.suggestions import Question
from rlhfless.prediction import run_plan
from rlhfless.prediction import scatter as scatter_of
from rlhfless.prediction.run_plan import Planner
from rlhfless.prediction.scatter import WIDEST, Scatter
from rlhfless.prediction.simulated import Predicted
from rlhfless.spec import RunSpec


def cost(steps: int = 4, step_s: float = 2.0, usd: float = 0.8) -> PlannedCost:
    return PlannedCost(
        steps=steps, step_s=step_s, wall_s=steps * step_s, wall_low_s=0, wall_high_s=0,
        cost_usd=usd, cost_low_usd=0, cost_high_usd=0,
    )  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, seconds: list[float], first: int = 1, again: tuple[int, ...] = ()) -> Any:
    """A trace whose steps took so long; the steps of `again` were done again after a fault."""
    records = [
        SimpleNamespace(step=step, start_s=0.0, resumed_s=float(step in again), seconds=each)
        for step, each in enumerate(seconds, start=first)
    ]
    monkeypatch.setattr(scatter_of, "measured_s", lambda record, trace: {"step": record.seconds})
    return SimpleNamespace(steps=records, meta=SimpleNamespace(run_id="demo-1"))


def test_the_band_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1, 2 and 3 s after a first one of 7 s, each predicted as 1 s: mean 2, deviation 1, cv 0.5, ratio 2. Of
    Student's t with 2 degrees the 95 % quantile is 2.920; a run of 6 such steps has
    2.920 x 0.5 x sqrt(1/3 + 1/6) = 1.0324 of its own and 1.6449 x 0.05 = 0.0822 between runs, together 1.0356."""
    found = Scatter.of(run(monkeypatch, [7.0, 1.0, 2.0, 3.0]), 1.0, "h100")
    assert found is not None
    assert (found.steps, found.ratio, found.cv, found.warm_up_s) == (3, 2.0, 0.5, 5.0)
    banded = found.banded(cost(steps=6, step_s=1.0, usd=0.6))
    factor = math.exp(1.0356)
    assert found.factor(6, 2.0) == pytest.approx(factor, rel=1e-3)
    assert (banded.step_s, banded.wall_s) == (2.0, 17.0), "the first step's extra seconds are added once"
    assert banded.wall_low_s == pytest.approx(17 / factor, rel=1e-3)
    assert banded.wall_high_s == pytest.approx(17 * factor, rel=1e-3)
    assert banded.cost_usd == pytest.approx(0.6 * 17 / 6)
    assert banded.cost_high_usd == pytest.approx(banded.cost_usd * factor, rel=1e-3)
    assert "90% of such runs, by 3 steps of demo-1, which scatter by 50%" in banded.band


def test_a_step_of_another_size_has_a_wider_band() -> None:
    """Ten times the size: 0.1 x 2.3026 = 0.2303, with 0.05 between runs 0.2356, x 1.6449 = 0.3876. The steps themselves
    do not scatter."""
    found = Scatter("r", 9, 1.0, 0.0, 3.0, 0.0, 0.05)
    assert found.factor(50, 30.0) == pytest.approx(math.exp(0.3876), rel=1e-3)
    assert found.factor(50, 0.3) == pytest.approx(found.factor(50, 30.0))
    assert found.factor(50, 3.0) == pytest.approx(math.exp(1.6449 * 0.05), rel=1e-3)


def test_the_same_run_again_is_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the fit is off by: predicted as 28 s, it had taken 18."""
    seconds = [2.0, 1.0, 1.5, 2.5, 2.0, 2.5, 2.0, 1.5, 1.5, 1.5]
    trace = run(monkeypatch, seconds)
    found = Scatter.of(trace, 2.8, "cpu-core")
    assert found is not None
    banded = found.banded(cost(steps=10, step_s=2.8))
    assert banded.wall_low_s < sum(seconds) < banded.wall_high_s
    assert banded.wall_s == pytest.approx(sum(seconds), rel=0.05)
    assert banded.wall_high_s < 2 * sum(seconds)


@pytest.mark.parametrize(
    ("seconds", "first", "again", "steps"),
    [
        ([9.0, 1.0, 1.2], 1, (), 2),
        ([1.0, 1.2], 7, (), 2),  # a run that was resumed has no first step
        ([9.0, 1.0, 50.0, 1.2], 1, (3,), 2),
        ([0.5, 9.0, 1.0, 1.2], 0, (), 2),  # evaluations before the first step have step 0
    ],
)
def test_warm_up_faults_and_evaluations_are_no_steps(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], first: int, again: tuple[int, ...], steps: int
) -> None:
    found = Scatter.of(run(monkeypatch, seconds, first, again), 1.1, "h100")
    assert found is not None
    assert (found.steps, found.ratio) == (steps, pytest.approx(1.0))


def test_one_step_says_nothing_of_the_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in ([3.0], [9.0, 3.0]):
        found = Scatter.of(run(monkeypatch, seconds), 3.0, "h100")
        assert found is not None
        assert (found.ratio, found.factor(10, 3.0)) == (1.0, WIDEST)
        assert "one step" in found.text
    assert Scatter.of(run(monkeypatch, []), 3.0, "h100") is None


def test_a_run_that_cannot_be_predicted_itself_counts_as_predicted_right(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Scatter.of(run(monkeypatch, [9.0, 1.0, 1.2, 1.4]), None, "h100")
    assert found is not None
    assert found.ratio == 1.0
    assert found.factor(10, 1.2) > 1.1


def test_few_steps_widen_the_band() -> None:
    by_steps = [Scatter("r", steps, 1.0, 0.2, 1.0, 0.0, 0.05).factor(50, 1.0) for steps in (2, 3, 5, 10, 100)]
    assert by_steps == sorted(by_steps, reverse=True)
    assert by_steps[0] > 2
    assert by_steps[-1] < 1.12
    assert max(Scatter("r", 2, 1.0, 5.0, 1.0, 0.0, 0.05).factor(n, 1.0) for n in (1, 10, 1000)) == WIDEST, (
        "never absurd"
    )


@pytest.mark.parametrize(("cv", "between"), [(0.05, 0.05), (0.15, 0.25), (0.3, 0.05)])
@pytest.mark.parametrize("measured", [3, 8, 20])
@pytest.mark.parametrize("steps", [2, 100])
def test_nine_of_ten_simulated_runs_end_within_their_band(cv: float, between: float, measured: int, steps: int) -> None:
    """Steps scatter as lognormal times, and the mean of a run from run to run. The prediction itself is off by a
    quarter, as the earlier run's was."""
    rng = np.random.default_rng(measured * steps)
    spread, inside, runs = math.sqrt(math.log(1 + cv**2)), 0, 1000
    for _ in range(runs):
        before = 3.0 * rng.lognormal(-(spread**2) / 2, spread, measured)
        later = 3.0 * rng.lognormal(-(spread**2) / 2, spread, steps) * math.exp(rng.normal(0, between))
        mean = before.mean()
        found = Scatter("r", measured, mean / 3.75, before.std(ddof=1) / mean, mean, 0.0, between)
        banded = found.banded(cost(steps, 3.75))
        inside += banded.wall_low_s <= later.sum() <= banded.wall_high_s
    assert 0.86 <= inside / runs <= 0.96


VALUES: dict[str, Any] = {
    "model": {"path": "m"},
    "prompts": {"path": "p.jsonl"},
    "rewards": [{"type": "exact_match"}],
    "steps": 10,
    "prompts_per_step": 32,
}


@pytest.mark.parametrize(("prompts", "wall_s"), [(32, 20.0), (64, 40.0)])
def test_a_plan_corrects_what_the_earlier_runs_own_prediction_is_off_by(
    monkeypatch: pytest.MonkeyPatch, prompts: int, wall_s: float
) -> None:
    """The simulator says 0.1 s for each prompt of a step, 3.2 s for the earlier run, whose steps took 2 s."""
    trace = run(monkeypatch, [2.0, 1.9, 2.1, 2.0, 1.8, 2.2])
    trace.holdings = [SimpleNamespace(device=f"cpu-{number}", device_kind="cpu-core") for number in range(2)]
    trace.meta.spec = VALUES

    def asked(spec: RunSpec, kind: str, count: int) -> Any:
        assert (kind, count) == ("cpu-core", 2)
        sheet = SimpleNamespace(kind=kind)
        return Question(spec, None, sheet, count, 1024, 0)  # type: ignore[arg-type]

    def made(planner: Planner, question: Question, latency: object) -> Predicted:
        assert latency == "fitted"
        return Predicted(cost(10, 0.1 * question.spec.prompts_per_step), 1.0, 1.0, {})

    monkeypatch.setattr(run_plan, "question_of", asked)
    monkeypatch.setattr(Planner, "_latency_of", lambda *_: "fitted")
    monkeypatch.setattr(Planner, "config", {})
    monkeypatch.setattr(Planner, "_made", made)
    spec = RunSpec.model_validate(VALUES | {"prompts_per_step": prompts})
    found, why = Planner(spec, trace).predicted(asked(spec, "cpu-core", 2))
    assert why is None
    assert found is not None
    assert found.cost.wall_s == pytest.approx(wall_s)
    assert found.cost.wall_low_s < wall_s / 1.4
    assert "5 steps of demo-1" in found.cost.band
