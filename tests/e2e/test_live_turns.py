"""A run whose functions take turns on one core, in which they die, which has a reward model, and which keeps an average
of its weights that its evaluations draw with: the samples and weights are those of a run without all this."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from fakes import saboteur
from fakes.live_runs import Whole, check_one_awake, fault_opening, fault_values
from fakes.model_folders import save_reward_model_of
from rlhfless.functions.scoring.reward_model import RewardModel
from rlhfless.orchestrator.host import Host
from rlhfless.orchestrator.run import RLRun
from rlhfless.records import Experience, FinishReason, FunctionName, ReplicaState, Work
from rlhfless.records.traces import compare_samples, read_trace
from rlhfless.rewards import RewardSample
from rlhfless.spec import RewardModelSpec

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 5


async def sabotage(run: RLRun) -> None:
    await saboteur.generating(run, 2)
    await saboteur.kill_learner(run)  # it is asleep
    await saboteur.generating(run, 4)
    await saboteur.kill_actor(run)


def test_turns_lost_functions_and_an_average_change_no_sample_and_no_weight(
    assets: Path, whole: Whole, tmp_path: Path
) -> None:
    path = save_reward_model_of(assets / "model", tmp_path / "judge")
    judge = {"type": "reward_model", "name": "judge", "path": path, "dtype": "float32", "weight": 0.0}
    start = fault_opening(
        assets, tmp_path / "run", actors=1, steps=STEPS, placement={"turns": True, "devices": 1},
        learner={"threads": 1, "ema_decay": 0.5}, evaluation={"every_steps": 2},
        rewards=[*fault_values(assets, 1)["rewards"], judge],
    )  # fmt: skip
    start.folder.mkdir()
    seen: list[Experience] = []

    class Watching(Host):
        def generated(self, run: RLRun, step: int, experience: Experience) -> None:
            seen.append(experience)

    recovered, digest = asyncio.run(saboteur.drive(dataclasses.replace(start, host=Watching()), sabotage))
    assert digest == whole.digest_after(STEPS), "of the weights that learn"
    assert recovered.replicas_lost >= 2
    trace = read_trace(start.folder / "trace")
    same = compare_samples(trace, whole.trace)
    assert (same.fraction, same.only_in_first) == (1.0, 0)
    assert {row.step for row in trace.rollouts} == set(range(1, STEPS + 1))
    check_one_awake(trace)
    for function in (FunctionName.GENERATION, FunctionName.LEARNER, FunctionName.REWARD_MODEL):
        asleep = [h for h in trace.holdings if h.function == function and h.state is ReplicaState.SLEEPING]
        assert len(asleep) >= STEPS - 2, function  # each one that dies does so once

    # Evaluations after 2, 4 and 5 steps, each with a version that no step is drawn with.
    held_out = [call for call in trace.invocations if call.work is Work.HELD_OUT and call.step]
    evaluated = {call.version for call in held_out}
    assert {call.step for call in held_out} == {2, 4, STEPS}
    assert len(evaluated) == 3
    assert not evaluated & {call.version for call in trace.invocations if call.work is Work.GENERATE}

    model = RewardModel(RewardModelSpec(**judge), threads=1)
    assert len(seen) >= STEPS
    for group in (group for experience in seen for group in experience.groups):
        ours = model.score(
            [RewardSample(group.prompt.text, each.text, 0, FinishReason.STOP, {}) for each in group.samples]
        )
        assert [each.score.parts["judge"] for each in group.samples] == pytest.approx(ours, abs=1e-5)
