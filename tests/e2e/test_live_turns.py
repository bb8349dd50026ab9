"""A run whose functions take turns on one core, and in which they die: the same samples and weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fakes import saboteur
from fakes.live_runs import FAULT_STEPS, Whole, fault_opening, tokens_of
from rlhfless.loop.run import Run
from rlhfless.records import FunctionName, ReplicaState
from rlhfless.records.traces import read_trace

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]


async def sabotage(run: Run) -> None:
    await saboteur.generating(run, 2)
    await saboteur.kill_learner(run)  # it is asleep
    await saboteur.generating(run, 4)
    await saboteur.kill_actor(run)


def test_a_learner_that_dies_asleep_and_an_actor_that_dies_awake_change_nothing(
    assets: Path, whole: Whole, tmp_path: Path
) -> None:
    start = fault_opening(assets, tmp_path, actors=1, placement={"turns": True, "devices": 1})
    recovered, digest = asyncio.run(saboteur.drive(start, sabotage))
    assert digest == whole.digest
    assert recovered.replicas_lost >= 2
    trace = read_trace(tmp_path / "trace")
    assert tokens_of(trace) == tokens_of(whole.trace)
    for function in (FunctionName.GENERATION, FunctionName.LEARNER):
        asleep = [h for h in trace.holdings if h.function == function and h.state is ReplicaState.SLEEPING]
        assert len(asleep) >= FAULT_STEPS - 2, function  # each one that dies does so once
