"""Distillation with the real parts, without rewards: a run that takes turns on one core and loses its teacher twice
gives the samples and weights of a run whose functions stay awake."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fakes import saboteur
from fakes.live_runs import check_one_awake, fault_opening
from rlhfless.bundled.model import SMALLEST, build_random
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.run import RLRun
from rlhfless.records import ReplicaState, Work
from rlhfless.records.traces import compare_samples, read_trace
from rlhfless.scaling.accounting import check_holdings

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 3
TEACHER = "teacher_other"


async def sabotage(run: RLRun) -> None:
    """Kill the teacher's rank, and then its replica, while a step generates."""
    for step, killed in ((2, lambda info: info.pids[0]), (3, lambda info: info.pid)):
        await saboteur.generating(run, step)
        await saboteur.until(lambda: bool(run.pools[TEACHER].replicas()))
        (replica,) = run.pools[TEACHER].replicas()
        await saboteur.until(lambda replica=replica: replica.info is not None)
        os.kill(killed(replica.info), signal.SIGKILL)


def test_turns_and_a_lost_teacher_change_no_sample_and_no_weight(assets: Path, tmp_path: Path) -> None:
    build_random(tmp_path / "teacher", seed=1, size=SMALLEST)
    distill: dict[str, Any] = {
        "algorithm": "distill",
        "rewards": [],
        "teachers": [{"name": "other", "path": str(tmp_path / "teacher")}],
        "steps": STEPS,
        "mini_batches": 1,
        "prompts_per_step": 16,
        "generation": {"max_tokens": 240, "progress_interval_s": 0.05},
    }
    plain = fault_opening(assets, tmp_path / "plain", actors=1, **distill)
    plain.folder.mkdir()
    asyncio.run(execute(plain))
    newest = plain.checkpoints.newest()
    assert newest is not None
    expected = read_trace(plain.folder / "trace")
    assert {kind.function for kind in expected.holdings} == {"generation", "learner", TEACHER}
    for step in expected.steps:
        assert step.metrics["reverse_kl/other"] > 0
        assert step.metrics["teacher_s"] > 0
        assert "reward_mean" not in step.metrics

    turns = fault_opening(assets, tmp_path / "turns", actors=1, placement={"turns": True, "devices": 1}, **distill)
    turns.folder.mkdir()
    recovered, digest = asyncio.run(saboteur.drive(turns, sabotage))
    assert digest == newest.notes.digest
    assert recovered.replicas_lost >= 2
    trace = read_trace(turns.folder / "trace")
    same = compare_samples(trace, expected)
    assert (same.fraction, same.only_in_first) == (1.0, 0)
    check_one_awake(trace)
    check_holdings(trace.holdings)
    assert any(row.function == TEACHER and row.state is ReplicaState.SLEEPING for row in trace.holdings)
    assert {call.step for call in trace.invocations if call.function == TEACHER and call.work is Work.LOGPROBS} == {
        1, 2, 3,
    }  # fmt: skip
