"""Episodes of several turns in live runs: whatever dies, they have the same tokens, rewards and weights."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes import saboteur
from fakes.live_runs import fault_opening
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.run import RLRun
from rlhfless.records.traces import Comparison, Trace, compare_samples, read_trace

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 6
AGENTS: dict[str, Any] = {
    "steps": STEPS,
    "rewards": [],
    "environment": {"type": "fakes.agent_game:Game", "turns": 4, "turn_tokens": 40, "sessions": 3, "call_s": 20},
    "generation": {"max_tokens": 300, "progress_interval_s": 0.1},
    "recovery": {"lease_s": 12, "heartbeat_s": 6},
}


async def kill_environment(run: RLRun) -> None:
    assert run.environment is not None
    os.kill(saboteur.pid(run.environment.replicas()[0]), signal.SIGKILL)


async def kill_worker(run: RLRun) -> None:
    """Kill a process that holds a session."""
    assert run.environment is not None
    (worker, *_) = psutil.Process(saboteur.pid(run.environment.replicas()[0])).children()
    worker.kill()


IN_GENERATION = {1: saboteur.drain_actor, 2: saboteur.kill_actor, 3: kill_environment, 4: kill_worker}
REPEATED = {3, 4}
"""Steps whose sessions die, so that calls are repeated in new ones."""


async def sabotage(run: RLRun) -> None:
    for step, act in IN_GENERATION.items():
        await saboteur.generating(run, step)
        await act(run)


def test_episodes_survive_all_kills(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("undisturbed", "broken"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("RLHFLESS_REWARD_LOG", str(tmp_path / "undisturbed.log"))
    start = fault_opening(assets, tmp_path / "undisturbed", actors=1, **AGENTS)
    asyncio.run(execute(start))
    whole = read_trace(tmp_path / "undisturbed" / "trace")
    newest = start.checkpoints.newest()
    assert newest is not None
    check_episodes(whole)
    id_of = {prompt.prompt_id: prompt.columns["id"] for prompt in whole.prompts}
    step_of = {id_of[row.prompt_id]: row.step for row in whole.rollouts}
    made = calls_of(tmp_path / "undisturbed.log", step_of)
    assert set(made.values()) == {1}

    monkeypatch.setenv("RLHFLESS_REWARD_LOG", str(tmp_path / "broken.log"))
    recovered, digest = asyncio.run(
        saboteur.drive(fault_opening(assets, tmp_path / "broken", actors=2, **AGENTS), sabotage)
    )
    broken = read_trace(tmp_path / "broken" / "trace")
    samples = len(whole.rollouts)
    assert compare_samples(whole, broken) == Comparison(samples, samples, None, 0, 0)
    assert [row.reward for row in by_key(broken)] == [row.reward for row in by_key(whole)]
    assert digest == newest.notes.digest
    again = calls_of(tmp_path / "broken.log", step_of)
    assert again.keys() == made.keys()
    twice = {step_of[call.split("/")[0]] for call, count in again.items() if count > 1}
    assert twice <= REPEATED, "a call was made twice although its session lived"
    assert recovered.replicas_lost >= 2


def calls_of(log: Path, prompts: Container[str]) -> Counter[str]:
    """Count the calls by prompt, seed and number, without those of evaluations, which repeat their seeds."""
    return Counter(call for call in log.read_text().split() if call.split("/")[0] in prompts)


def by_key(trace: Trace) -> list[Any]:
    return sorted(trace.rollouts, key=lambda row: (row.step, row.prompt_id, row.sample_index))


def check_episodes(trace: Trace) -> None:
    """Check each row against its episode."""
    assert len(trace.rollouts) == STEPS * 8
    for row in trace.rollouts:
        episode = row.episode
        assert episode is not None
        assert row.episode_status == episode["status"] == "done"
        assert row.turns == len(episode["turns"]) == len(episode["calls"]) == 3
        assert row.token_ids is not None
        assert row.response_tokens == len(row.token_ids) == episode["turns"][-1]["end"]
        generated = sum(turn["end"] - turn["start"] for turn in episode["turns"])
        assert row.environment_tokens == row.response_tokens - generated > 0
        assert row.reward_parts == {"environment": row.reward}
        assert row.environment_s >= 3 * 0.05
        waits = [call["wait_s"] for call in episode["calls"]]
        assert row.environment_s == pytest.approx(sum(waits))
