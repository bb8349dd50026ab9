"""Checkpoints that are written while the run continues, in the driver's order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless.fleet.replica import ReplicaLost
from rlhfless.orchestrator.host import Host
from rlhfless.orchestrator.ledger import StepClock
from rlhfless.orchestrator.run_steps import RunSteps
from rlhfless.records.checkpoints import CheckpointError


class FakeRun:
    """Saves each step; the test ends the writing of each checkpoint."""

    held_out = ()
    trainers = SimpleNamespace(must_move=False)
    checkpoints = None

    def __init__(self) -> None:
        self.spec = SimpleNamespace(
            steps=9, checkpoint=SimpleNamespace(every_steps=1), evaluation=SimpleNamespace(every_steps=None)
        )
        self.clock = StepClock()
        self.writing: dict[int, asyncio.Future[None]] = {}

    async def checkpoint(self, step: int, begun: asyncio.Event) -> None:
        self.writing[step] = asyncio.get_running_loop().create_future()
        begun.set()
        await self.writing[step]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    async def obey(_: Any, step: int, *, saved: bool) -> None: ...

    monkeypatch.setattr(RunSteps, "_obey", obey)
    return FakeRun()


def steps_of(run: FakeRun) -> RunSteps:
    return RunSteps(run, SimpleNamespace(spec=run.spec, host=Host()), 1)  # type: ignore[arg-type]


async def closing(steps: RunSteps, step: int) -> asyncio.Task[None]:
    """Start closing a step, and run everything that does not wait for the test."""
    task = asyncio.create_task(steps.close(step))
    for _ in range(20):
        await asyncio.sleep(0)
    return task


async def test_the_run_goes_on_while_one_checkpoint_is_written_and_waits_before_the_next(run: FakeRun) -> None:
    steps = steps_of(run)
    assert (await closing(steps, 1)).done()
    second = await closing(steps, 2)
    assert not second.done()
    assert list(run.writing) == [1]
    run.writing[1].set_result(None)
    await second
    assert list(run.writing) == [1, 2]


async def test_the_last_one_is_waited_for(run: FakeRun) -> None:
    last = await closing(steps_of(run), 9)
    assert not last.done()
    run.writing[9].set_result(None)
    await last


async def test_one_that_cannot_be_written_stops_the_run_after_its_step(run: FakeRun) -> None:
    steps = steps_of(run)
    await closing(steps, 1)
    run.writing[1].set_exception(CheckpointError("no space"))
    with pytest.raises(CheckpointError, match="no space"):
        await (await closing(steps, 2))


async def test_one_whose_learner_is_lost_does_not_count(run: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    """The step that needs the learner reports the loss itself."""
    steps = steps_of(run)
    await closing(steps, 1)
    run.writing[1].set_exception(ReplicaLost("rank 1 was lost"))
    assert (await closing(steps, 2)).done()
    assert "rank 1 was lost" in caplog.text


async def test_at_the_end_nothing_is_left_to_write(run: FakeRun) -> None:
    steps = steps_of(run)
    await closing(steps, 1)
    await steps.end()
    await asyncio.sleep(0)
    assert run.writing[1].cancelled()
