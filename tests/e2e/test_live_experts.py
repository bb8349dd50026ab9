"""A run of a mixture of experts: divided over two ranks, with the engine's routes replayed, and broken in mid-step."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fakes import saboteur
from fakes.live_runs import fault_opening
from rlhfless.bundled.model import SMALLEST, build_random
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.session import JOURNAL_FILE, Session
from rlhfless.records.journal import Journal
from rlhfless.records.routes import FOLDER
from rlhfless.records.traces import read_trace

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 4
EXPERTS = dataclasses.replace(SMALLEST, hidden=64, layers=2, mlp=128, experts=4, max_positions=512)


def opening(assets: Path, folder: Path, actors: int = 1, **changes: Any) -> Session:
    folder.mkdir()
    options = {
        "model": {"path": str(folder.parent / "experts")},
        # Without the engine's logprobs, whose last bits depend on what else it computes.
        "algorithm": {"type": "grpo", "router_replay": "engine", "importance": None},
        "optimizer": {"learning_rate": 1e-2},
        "learner": {"ranks": 2, "threads": 1},
        "steps": STEPS,
        "mini_batches": 1,
        # Steps of a second or more, so that they can be broken.
        "prompts_per_step": 16,
        "samples_per_prompt": 4,
    }
    return fault_opening(assets, folder, actors=actors, **(options | changes))


async def break_it(run: RLRun) -> None:
    await saboteur.generating(run, 2)
    await saboteur.drain_actor(run)
    await saboteur.generating(run, 3)
    await saboteur.kill_actor(run)
    await saboteur.generating(run, 4)
    await saboteur.kill_rank(run)


def test_routes_go_from_engine_to_learner_whatever_dies(assets: Path, tmp_path: Path) -> None:
    build_random(tmp_path / "experts", seed=0, size=EXPERTS)
    calm, broken = tmp_path / "calm", tmp_path / "broken"
    start = opening(assets, calm)
    asyncio.run(execute(start))
    newest = start.checkpoints.newest()
    assert newest is not None
    trace = read_trace(calm / "trace")
    assert len(trace.steps) == STEPS
    for step in trace.steps:
        assert step.metrics["missing_routes"] == 0
        assert step.metrics["differing_routes"] < 0.01  # in float32 both sides choose the same
        assert step.metrics["rollout_logprob_difference_max"] < 1e-3
        assert 0 < step.metrics["router_entropy"] < 1.4
    assert not list((calm / FOLDER).glob("step-*/*")), "the last checkpoint covers all steps"

    recovered, digest = asyncio.run(saboteur.drive(opening(assets, broken, actors=2), break_it))
    assert recovered.replicas_lost >= 2
    assert digest == newest.notes.digest
    assert all(step.metrics["missing_routes"] == 0 for step in read_trace(broken / "trace").steps)


def test_the_journal_names_the_routes_and_holds_none(assets: Path, tmp_path: Path) -> None:
    build_random(tmp_path / "experts", seed=0, size=EXPERTS)
    start = opening(assets, tmp_path / "run", steps=1, learner={"ranks": 1}, checkpoint={"every_steps": 100})
    asyncio.run(execute(start))
    journal = Journal(tmp_path / "run" / JOURNAL_FILE)
    rollouts = journal.rollouts(1)
    journal.close()
    for rollout in rollouts:
        (span,) = rollout.routes
        assert (span.start, span.end, span.row) == (0, len(rollout.token_ids) - 1, 0)
        assert (tmp_path / "run" / FOLDER / span.file).is_file()
