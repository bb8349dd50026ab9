"""A run whose functions take turns on one core, in which they die, and which keeps an average of its weights that its
evaluations draw with: the samples and weights are those of a run without all this."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fakes import saboteur
from fakes.live_runs import Whole, fault_opening
from rlhfless.loop.run import Run
from rlhfless.records import FunctionName, ReplicaState, Work
from rlhfless.records.compare import compare_samples
from rlhfless.records.traces import read_trace

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 5


async def sabotage(run: Run) -> None:
    await saboteur.generating(run, 2)
    await saboteur.kill_learner(run)  # it is asleep
    await saboteur.generating(run, 4)
    await saboteur.kill_actor(run)


def test_turns_lost_functions_and_an_average_change_no_sample_and_no_weight(
    assets: Path, whole: Whole, tmp_path: Path
) -> None:
    start = fault_opening(
        assets, tmp_path, actors=1, steps=STEPS, placement={"turns": True, "devices": 1},
        learner={"ema_decay": 0.5}, evaluation={"every_steps": 2},
    )  # fmt: skip
    recovered, digest = asyncio.run(saboteur.drive(start, sabotage))
    assert digest == whole.digest_after(STEPS), "of the weights that learn"
    assert recovered.replicas_lost >= 2
    trace = read_trace(tmp_path / "trace")
    same = compare_samples(trace, whole.trace)
    assert (same.fraction, same.only_in_first) == (1.0, 0)
    assert {row.step for row in trace.rollouts} == set(range(1, STEPS + 1))
    for function in (FunctionName.GENERATION, FunctionName.LEARNER):
        asleep = [h for h in trace.holdings if h.function == function and h.state is ReplicaState.SLEEPING]
        assert len(asleep) >= STEPS - 2, function  # each one that dies does so once

    # Evaluations after 2, 4 and 5 steps, each with a version that no step is drawn with.
    held_out = [call for call in trace.invocations if call.work is Work.HELD_OUT and call.step]
    evaluated = {call.version for call in held_out}
    assert {call.step for call in held_out} == {2, 4, STEPS}
    assert len(evaluated) == 3
    assert not evaluated & {call.version for call in trace.invocations if call.work is Work.GENERATE}
