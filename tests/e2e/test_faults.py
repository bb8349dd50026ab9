"""Whatever dies in a run, it ends with the very weights of a run in which nothing died."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import psutil
import pytest

from fakes import saboteur
from fakes.live_runs import FAULT_STEPS, Whole, fault_opening
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.run import RLRun
from rlhfless.records import PublishedWeights
from rlhfless.records.traces import Comparison, compare_samples, read_trace
from rlhfless.scaling.accounting import Phase, check_holdings, step_times

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

IN_GENERATION = {
    1: saboteur.kill_actor,
    2: saboteur.stop_engine,
    3: saboteur.kill_learner,
    4: saboteur.kill_scoring,
    5: saboteur.stop_actor,
    6: saboteur.kill_rank,
    7: saboteur.drain_actor,
}


async def sabotage(run: RLRun) -> None:
    cut_file_before(run, FAULT_STEPS)
    for step, act in IN_GENERATION.items():
        await saboteur.generating(run, step)
        await act(run)


def cut_file_before(run: RLRun, step: int) -> None:
    """Let the weights of `step` be damaged before any actor has read them, once."""
    sync = run.weights.sync

    async def damaged(published: PublishedWeights, call: Call, asked: asyncio.Event | None = None) -> None:
        if call.step == step and published.version.step == step - 1:
            run.weights.sync = sync  # type: ignore[method-assign]
            await saboteur.cut_store_file(run)
        await sync(published, call, asked)

    run.weights.sync = damaged  # type: ignore[method-assign]


@pytest.mark.long
def test_a_run_that_is_broken_in_every_way_ends_as_if_nothing_had_happened(
    whole: Whole, assets: Path, tmp_path: Path
) -> None:
    """Against a run with one actor; this one has two, which come and go."""
    recovery = {"lease_s": 12, "heartbeat_s": 6}
    recovered, digest = asyncio.run(
        saboteur.drive(fault_opening(assets, tmp_path, actors=2, recovery=recovery), sabotage)
    )
    # Learner, rank, scoring, store; the work of a lost actor moves, and no step is done again for it.
    assert recovered.steps_again >= 4
    assert recovered.replicas_lost >= 6  # two actors, an engine, scoring, and the learner twice; one more was drained
    broken = read_trace(tmp_path / "trace")
    keys = Counter((row.step, row.prompt_id, row.sample_index) for row in broken.rollouts)
    assert set(keys.values()) == {1}
    assert compare_samples(whole.trace, broken) == Comparison(len(keys), len(keys), None, 0, 0)
    assert [step.step for step in broken.steps] == list(range(1, FAULT_STEPS + 1))
    for ours, theirs in zip(broken.steps, whole.trace.steps, strict=True):
        assert ours.metrics["loss"] == pytest.approx(theirs.metrics["loss"], abs=1e-6)
    assert digest == whole.digest
    recoveries = [decision for decision in broken.decisions if decision.kind == "recover"]
    assert sum(each.step - int(each.inputs["next_step"]) + 1 for each in recoveries) == recovered.steps_again
    for step in broken.steps:  # what a fault cost is in the step's own figures
        times = step_times(step, broken.invocations)
        faults = [each for each in recoveries if each.step == step.step and each.at_s < step.end_s]
        spent_s = sum(float(each.inputs["recovered_in_s"]) for each in faults)
        assert times.recovery_s >= spent_s
        # Weights that move count as outside, so their phase is no further part of the whole.
        worked_s = max(spent for phase, spent in times.phases_s.items() if phase is not Phase.SYNC)
        assert times.wall_s >= times.recovery_s + times.overhead_s + worked_s
    check_holdings(broken.holdings)
    names = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [name for name in names if "ServeReplica" in name or "vllm.loop" in name]


HUNG_S = 40.0
"""Limit of a learner's call in the run whose rank hangs; a step of it takes a second."""


async def hang(run: RLRun) -> None:
    await saboteur.generating(run, 2)
    await saboteur.stop_rank(run)


@pytest.mark.seldom
@pytest.mark.long
def test_a_rank_that_hangs_is_replaced_within_its_time(whole: Whole, assets: Path, tmp_path: Path) -> None:
    times = {"drain_s": 3, "call_s": HUNG_S}
    start = fault_opening(assets, tmp_path, actors=1, timeouts=times, scoring={"timeout_s": 15})
    recovered, digest = asyncio.run(saboteur.drive(start, hang))
    assert (recovered.replicas_lost, recovered.steps_again) == (1, 2), "from the start's weights: no checkpoint yet"
    assert digest == whole.digest
    (decision,) = [each for each in read_trace(tmp_path / "trace").decisions if each.kind == "recover"]
    assert str(decision.inputs["fault"]).startswith(f"CallTimeout: waited {HUNG_S:g} s for learn of step 2")
