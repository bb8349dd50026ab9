"""A run whose reference and reward model have two ranks each: it gives their models' own figures, and outlives ranks
that are killed or hang."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import psutil
import pytest

from fakes import saboteur
from fakes.live_runs import fault_opening
from fakes.model_folders import save_reward_model_of
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import Replica
from rlhfless.functions.scoring.reward_model import RewardModel
from rlhfless.orchestrator.host import Host
from rlhfless.orchestrator.recovery import Recovered
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.run_steps import drive_steps
from rlhfless.orchestrator.session import Session, open_session
from rlhfless.records import Experience, FinishReason
from rlhfless.records.traces import read_trace
from rlhfless.rewards import RewardSample
from rlhfless.spec import RewardModelSpec

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.seldom, pytest.mark.timeout(900)]

STEPS = 4
LEASE_S = 12.0


async def rank_of(pool: ReplicaPool | None, number: int) -> int:
    """The process of a rank, once its replica is up."""
    assert pool is not None
    await saboteur.until(lambda: any(replica.info for replica in pool.replicas()))
    (info,) = (replica.info for replica in pool.replicas() if replica.info)
    assert len(info.pids) == 2
    return info.pids[number]


async def sabotage(run: RLRun) -> int:
    """Returns the process that was made to hang."""
    await saboteur.generating(run, 2)
    os.kill(await rank_of(run.pools["reference"], 1), signal.SIGKILL)
    await saboteur.generating(run, 3)
    hangs = await rank_of(run.pools["reward_model"], 0)
    os.kill(hangs, signal.SIGSTOP)
    return hangs


async def drive(start: Session) -> tuple[Recovered, int]:
    async with open_session(start) as (run, first):
        saboteurs = asyncio.create_task(sabotage(run))
        recovered = await drive_steps(start, run, first)
        assert saboteurs.done(), "a step ended before it was broken"
        return recovered, saboteurs.result()


def test_two_ranks_each_and_both_lose_one(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_reward_model_of(assets / "model", tmp_path / "rewards")
    reasons: list[str] = []
    give_up = Replica.give_up

    def told(replica: Replica, reason: str) -> None:
        reasons.append(f"{replica.function}: {reason}")
        give_up(replica, reason)

    monkeypatch.setattr(Replica, "give_up", told)
    reward = {"type": "reward_model", "path": path, "dtype": "float32"}
    start = fault_opening(
        assets,
        tmp_path / "run",
        actors=1,
        steps=STEPS,
        mini_batches=1,
        rewards=[reward],
        algorithm={"kl": {"coefficient": 0.01}},
        reference={"ranks": 2},
        scoring={"reward_model_ranks": 2},
        recovery={"lease_s": LEASE_S, "heartbeat_s": 6},
        scaling={
            "generation": {"min_actors": 1, "max_actors": 1},
            "hold_scoring": "always",
            "hold_reference": "always",
        },
    )
    start.folder.mkdir()
    seen: list[Experience] = []

    class Watching(Host):
        def generated(self, run: RLRun, step: int, experience: Experience) -> None:
            seen.append(experience)

    start = dataclasses.replace(start, host=Watching())
    recovered, hung = asyncio.run(drive(start))
    assert recovered.replicas_lost == 2
    assert any("reference rank 1 was lost" in reason for reason in reasons), reasons
    assert any("a reward model rank did not finish" in reason and "still at work: 0" in reason for reason in reasons)
    assert not psutil.pid_exists(hung)
    trace = read_trace(start.folder / "trace")
    assert [step.step for step in trace.steps] == list(range(1, STEPS + 1))
    assert trace.steps[0].metrics["reference_kl"] < 1e-6  # it is the policy before its first update
    assert trace.steps[-1].metrics["reference_kl"] > 0
    model = RewardModel(RewardModelSpec(**reward), threads=1)
    for experience in seen:
        for group in experience.groups:
            ours = model.score(
                [RewardSample(group.prompt.text, each.text, 0, FinishReason.STOP, {}) for each in group.samples]
            )
            assert [each.score.total for each in group.samples] == pytest.approx(ours, abs=1e-5)
