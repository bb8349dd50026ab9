"""A learner whose number of ranks changes, in a run with engines that draw meanwhile: the same tokens and losses as
with a fixed number, and a resumed run begins with the number that it had."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.live_runs import PausesAfter, fault_opening, tokens_of
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.host import Host, RunPaused
from rlhfless.orchestrator.learner_size import LearnerSize
from rlhfless.orchestrator.session import Session
from rlhfless.records import FunctionName, ReplicaState
from rlhfless.records.traces import Trace, read_trace
from rlhfless.scaling.accounting import check_holdings
from rlhfless.scaling.learner_ranks import LEARNER_RANKS
from rlhfless.scaling.placement import Allocation

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.seldom, pytest.mark.timeout(900)]

STEPS = 5


def opening(assets: Path, folder: Path, **learner: Any) -> Session:
    """A core for the actor, and one for the learner's ranks."""
    folder.mkdir()
    return fault_opening(
        assets,
        folder,
        actors=1,
        steps=STEPS,
        schedule="one_step_off",
        placement={"mode": "disaggregated", "devices": 2, "learner_devices": 1},
        optimizer={"learning_rate": 1e-4},
        checkpoint={"every_steps": None},
        learner={"threads": 1, "ranks": 2} | learner,
    )


def ranks_of(trace: Trace) -> list[tuple[int, str, object]]:
    made = (decision for decision in trace.decisions if decision.kind == LEARNER_RANKS)
    return [(each.step, each.choice, each.inputs["through"]) for each in made]


def by_step(*wanted: int | None) -> Callable[[LearnerSize], Awaitable[Allocation | None]]:
    """Replace LearnerSize.larger: the number of ranks after steps 1, 2 and so on; None keeps it."""
    numbers = iter(wanted)

    async def larger(size: LearnerSize) -> Allocation | None:
        ranks = next(numbers)
        return None if ranks is None else size._candidates[ranks][0]

    return larger


def test_two_ranks_then_one_and_two_again_while_the_next_step_is_drawn(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = opening(assets, tmp_path / "fixed")
    asyncio.run(execute(fixed))
    monkeypatch.setattr(LearnerSize, "larger", by_step(1, None, 2, None))
    start = opening(assets, tmp_path / "elastic", min_ranks=1)
    asyncio.run(execute(start))
    ours, theirs = (read_trace(folder.folder / "trace") for folder in (start, fixed))
    assert ranks_of(ours) == [(1, "1", "shared memory"), (3, "2", "shared memory")]
    assert tokens_of(ours) == tokens_of(theirs)
    assert [record.step for record in ours.steps] == list(range(1, STEPS + 1))
    for one, other in zip(ours.steps, theirs.steps, strict=True):
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1e-6)
        assert one.metrics["staleness_max"] == other.metrics["staleness_max"]
    check_holdings(ours.holdings)
    devices = {
        name: {row.device for row in ours.holdings if row.function == name and row.state is ReplicaState.SERVING}
        for name in (FunctionName.LEARNER, FunctionName.GENERATION)
    }
    assert not devices[FunctionName.LEARNER] & devices[FunctionName.GENERATION]


def test_a_resumed_run_begins_with_the_ranks_that_it_had(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LearnerSize, "larger", by_step(1, None))
    start = replace(opening(assets, tmp_path / "run", min_ranks=1), host=PausesAfter(2))
    with pytest.raises(RunPaused):
        asyncio.run(execute(start))
    sizes: list[int] = []

    async def noted(size: LearnerSize) -> None:
        sizes.append(size.ranks)

    monkeypatch.setattr(LearnerSize, "larger", noted)
    asyncio.run(execute(replace(start, host=Host())))
    assert sizes == [1, 1], "after steps 3 and 4"
    trace = read_trace(start.folder / "trace")
    assert [record.step for record in trace.steps] == list(range(1, STEPS + 1))
