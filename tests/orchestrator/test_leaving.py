"""A learner whose node leaves is saved after the step and moves to another node."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.live_runs import PausesAfter
from rlhfless.fleet.leaving_watch import LeavingWatch
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.base_run import TrainerPools
from rlhfless.orchestrator.host import Host, RunPaused
from rlhfless.orchestrator.ledger import StepClock
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.run_steps import RunSteps
from rlhfless.spec.keys import LimitsSpec


class FakeRun:
    """Records actions in order. Its steps are saved every ten."""

    held_out = ()

    def __init__(self, *, must_move: bool) -> None:
        self.done: list[str] = []
        self.ledger: Any = None
        self.pools: dict[str, Any] = {}
        pool = SimpleNamespace(must_move=must_move, replicas=lambda: ["old"], stop=self.stop, function="learner")
        self.trainers = TrainerPools([pool], None, None)  # type: ignore[arg-type, list-item]
        self.spec = SimpleNamespace(
            steps=20,
            checkpoint=SimpleNamespace(every_steps=10),
            evaluation=SimpleNamespace(every_steps=None),
            limits=SimpleNamespace(cost_usd=None, device_hours=None, wall_s=None),
        )
        self.checkpoints = None
        self.clock = StepClock()

    async def checkpoint(self, step: int, begun: asyncio.Event) -> None:
        begun.set()
        self.done.append(f"save {step}")

    async def move_trainers(self) -> None:
        await RLRun.move_trainers(self)  # type: ignore[arg-type]

    async def restore_and_open(self) -> int:
        return await RLRun.restore_and_open(self)  # type: ignore[arg-type]

    async def stop(self, *replicas: str) -> None:
        self.done.append(f"stop {replicas[0]}")

    async def restore(self) -> int:
        self.done.append("restore")
        return 3

    async def open_weights(self, step: int) -> None:
        self.done.append(f"publish {step}")


@pytest.mark.parametrize(
    ("must_move", "step", "done"),
    [
        (False, 3, []),
        (True, 3, ["save 3", "stop old", "restore", "publish 3"]),
        (False, 10, ["save 10"]),
        (True, 0, []),  # nothing has been learned yet
        (True, 20, ["save 20"]),  # the run ends anyway
    ],
)
async def test_a_learner_moves_after_the_step(
    monkeypatch: pytest.MonkeyPatch, must_move: bool, step: int, done: list[str]
) -> None:
    monkeypatch.setattr(RunSteps, "_obey", _does_not_obey)
    run = FakeRun(must_move=must_move)
    await RunSteps(run, SimpleNamespace(spec=run.spec, host=Host()), step).close(step)  # type: ignore[arg-type]
    assert run.done == done


async def test_a_learner_whose_run_changes_its_size_does_not_move_first() -> None:
    run, host = FakeRun(must_move=True), PausesAfter(3)
    run.spec.limits = LimitsSpec()
    run.ledger = SimpleNamespace(spent=lambda _: SimpleNamespace(cost_usd=0, device_s=0, held_s=0))
    with pytest.raises(RunPaused, match="stopped after step 3"):
        await RunSteps(run, SimpleNamespace(spec=run.spec, host=host), 3).close(3)  # type: ignore[arg-type]
    assert run.done == ["save 3"]


async def _does_not_obey(_: Any, step: int, *, saved: bool) -> None: ...


def test_each_notice_reaches_every_pool() -> None:
    heard: list[tuple[str, frozenset[str]]] = []

    def pool(name: str) -> Any:
        return SimpleNamespace(leave_nodes=lambda nodes, _: heard.append((name, nodes)))

    watch = LeavingWatch([pool("actors"), pool("learner")], Call("run", 1, 0))
    watch.update(["n1"])
    watch.update([])
    assert heard == [
        ("actors", frozenset({"n1"})),
        ("learner", frozenset({"n1"})),
        ("actors", frozenset()),
        ("learner", frozenset()),
    ]
