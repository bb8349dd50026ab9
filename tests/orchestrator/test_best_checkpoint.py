"""Selection of the checkpoints to save for their held-out metric, and of the best checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless.orchestrator.base_run import BaseRun
from rlhfless.orchestrator.host import Host
from rlhfless.orchestrator.ledger import StepClock
from rlhfless.orchestrator.run_steps import RunSteps
from rlhfless.records.checkpoints import Checkpoint, CheckpointNotes, Checkpoints
from rlhfless.spec import BestSpec, CheckpointSpec, EvaluationSpec


class Saved(Checkpoints):
    """Checkpoints in memory."""

    def __init__(self, best: BestSpec) -> None:
        super().__init__("/nowhere", 2, best)
        self.held: list[Checkpoint] = []

    def all(self) -> list[Checkpoint]:
        return self.held


class FakeRun:
    """Evaluates to given values, and saves at once."""

    held_out = ("a prompt",)
    trainers = SimpleNamespace(must_move=False)
    score, improves = BaseRun.score, BaseRun.improves

    def __init__(self, figures: Mapping[int, float], every: int | None, best: BestSpec) -> None:
        self.spec = SimpleNamespace(
            steps=9, checkpoint=CheckpointSpec(every_steps=every, best=best), evaluation=EvaluationSpec(every_steps=2)
        )
        self.figures, self.checkpoints = figures, Saved(best)
        self.clock = StepClock()
        self.latest: dict[str, float] = {"reward_mean": 0.25}
        self.before: Mapping[str, float] = {}
        self.evaluated = -1

    async def checkpoint(self, step: int, begun: asyncio.Event) -> None:
        begun.set()
        metric = self.spec.checkpoint.best.metric
        notes = CheckpointNotes("run", 1, step, "ab", self.score(step), {}, metric=metric)  # type: ignore[arg-type]
        self.checkpoints.held.append(Checkpoint(f"/step-{step}", notes))


async def saved_by(
    monkeypatch: pytest.MonkeyPatch, figures: Mapping[int, float], every: int | None, best: BestSpec
) -> FakeRun:
    """Drive a run of nine steps that is evaluated after every second step."""
    run = FakeRun(figures, every, best)

    async def obey(_: Any, step: int, *, saved: bool) -> None: ...

    async def evaluate(_: Any, step: int) -> Mapping[str, float]:
        return {best.metric.removeprefix("eval/"): figures[step]}

    monkeypatch.setattr(RunSteps, "_obey", obey)
    steps = RunSteps(
        run,  # type: ignore[arg-type]
        SimpleNamespace(  # type: ignore[arg-type]
            spec=run.spec,
            host=Host(),
            sinks=SimpleNamespace(emit=lambda *_: None),
            console=SimpleNamespace(waiting=lambda _: nullcontext()),
        ),
        0,
    )
    monkeypatch.setattr(steps, "_stages", SimpleNamespace(evaluate_held_out=evaluate))
    for step in range(10):
        await steps.close(step)
    await steps.end()
    return run


RISES_AND_FALLS = {0: 0.1, 2: 0.3, 4: 0.7, 6: 0.6, 8: 0.2, 9: 0.4}
LARGEST = BestSpec(metric="eval/reward_mean", mode="max")


@pytest.mark.parametrize(
    ("figures", "every", "best", "saved", "chosen"),
    [
        (RISES_AND_FALLS, None, LARGEST, [2, 4, 9], 4),
        (RISES_AND_FALLS, 3, LARGEST, [2, 3, 4, 6, 9], 4),  # 3 was not evaluated, and 6 is no improvement
        (RISES_AND_FALLS, None, BestSpec(metric="eval/loss", mode="min"), [2, 8, 9], 8),
        (RISES_AND_FALLS, 3, BestSpec(metric="eval/reward_mean", mode="max", save=False), [3, 6, 9], 6),
        (RISES_AND_FALLS, 4, BestSpec(metric="reward_mean", mode="max"), [4, 8, 9], 9),
        (dict.fromkeys(RISES_AND_FALLS, 0.5), None, LARGEST, [2, 9], 9),  # equal is no improvement; the later counts
        (RISES_AND_FALLS | {4: float("nan")}, None, LARGEST, [2, 6, 9], 6),
        (RISES_AND_FALLS | {9: float("nan")}, None, LARGEST, [2, 4, 9], 4),
    ],
)
async def test_an_evaluation_that_improves_is_saved(
    monkeypatch: pytest.MonkeyPatch,
    figures: Mapping[int, float],
    every: int | None,
    best: BestSpec,
    saved: list[int],
    chosen: int,
) -> None:
    run = await saved_by(monkeypatch, figures, every, best)
    assert [each.notes.step for each in run.checkpoints.held] == saved
    found = run.checkpoints.best(run.checkpoints.held)
    assert found is not None
    assert found.notes.step == chosen


def notes(step: int, score: float | None, metric: str) -> Checkpoint:
    return Checkpoint(f"/step-{step}", CheckpointNotes("run", 1, step, "ab", score, {}, metric=metric))


def test_the_best_is_named_with_its_metric_value_and_step() -> None:
    checkpoints = Checkpoints("/nowhere", 2, LARGEST)
    rows = [notes(2, 0.5, "eval/reward_mean"), notes(4, 0.875, "eval/reward_mean"), notes(6, None, "eval/reward_mean")]
    best = checkpoints.best(rows)
    assert best is rows[1]
    assert checkpoints.best_by(best) == "eval/reward_mean = 0.875 after step 4, the largest of the saved steps"
    assert checkpoints.best_by(rows[2]) == "the newest, because eval/reward_mean was not measured at a saved step"


def test_scores_of_another_metric_do_not_count() -> None:
    """`checkpoint.best` may change when a run is resumed."""
    checkpoints = Checkpoints("/nowhere", 1, LARGEST)
    rows = [notes(2, 0.5, "eval/reward_mean"), notes(4, 7.0, "reward_mean"), notes(6, 0.25, "")]
    assert checkpoints.best(rows) is rows[0]
    assert checkpoints.kept(rows) == {2, 6}
