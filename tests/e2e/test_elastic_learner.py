"""A learner whose number of ranks changes, between two steps and after a lost device, learns as one with fixed ranks.

Runs of type sft, which need no engine: on two cores each of two ranks has one.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from fakes import saboteur
from rlhfless.bundled.task import TaskRecipe, draw_problems
from rlhfless.orchestrator.base_run import BaseRun
from rlhfless.orchestrator.learner_size import LearnerSize
from rlhfless.orchestrator.recovery import Recovered
from rlhfless.orchestrator.run_steps import drive_steps
from rlhfless.orchestrator.session import Session, open_session
from rlhfless.planning.preflight import preflight
from rlhfless.records import Decision, ReplicaState
from rlhfless.records.traces import Trace, read_trace
from rlhfless.scaling.accounting import check_holdings
from rlhfless.scaling.learner_ranks import LEARNER_RANKS
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import RunSpec
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.sinks import MetricSinks

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 8


def opening(assets: Path, folder: Path, **learner: Any) -> Session:
    folder.mkdir()
    problems = draw_problems(TaskRecipe(), np.random.default_rng(5), 128, held_out=False)
    lines = [json.dumps({"prompt": each.prompt, "response": each.answer}) + "\n" for each in problems]
    (folder / "train.jsonl").write_text("".join(lines[:-8]))
    (folder / "held-out.jsonl").write_text("".join(lines[-8:]))
    values = {
        "type": "sft",
        "name": "elastic",
        "model": {"path": str(assets / "model")},
        "demonstrations": {
            "path": str(folder / "train.jsonl"),
            "held_out": {"path": str(folder / "held-out.jsonl")},
        },
        "steps": STEPS,
        "prompts_per_step": 16,
        "optimizer": {"learning_rate": 1e-3},
        "learner": {"threads": 1, "ranks": 2} | learner,
        "checkpoint": {"every_steps": 2},
        "timeouts": {"drain_s": 3},
        "output": str(folder),
    }
    spec = RunSpec.model_validate(values)
    console = Console("lines", "elastic", STEPS, stream=io.StringIO())
    return Session(preflight(spec), f"e-{uuid4().hex[:6]}", folder, console, MetricSinks([]))


Act = Callable[[BaseRun], Awaitable[None]]


async def nothing(_: BaseRun) -> None: ...


def driven(start: Session, act: Act = nothing) -> tuple[Recovered, Trace]:
    """A run to its end, with something that is done to it meanwhile."""

    async def drive() -> Recovered:
        async with open_session(start) as (run, first):
            acting = asyncio.create_task(act(run))
            recovered = await drive_steps(start, run, first)
            await acting
            return recovered

    recovered = asyncio.run(drive())
    return recovered, read_trace(start.folder / "trace")


def assert_alike(trace: Trace, fixed: Trace) -> None:
    """The same losses and gradients, up to the order of sums."""
    assert [record.step for record in trace.steps] == list(range(1, STEPS + 1))
    for ours, theirs in zip(trace.steps, fixed.steps, strict=True):
        assert ours.metrics["loss"] == pytest.approx(theirs.metrics["loss"], abs=1e-6)
        assert ours.metrics["gradient_norm"] == pytest.approx(theirs.metrics["gradient_norm"], rel=1e-4)


def changes(trace: Trace) -> list[Decision]:
    return [decision for decision in trace.decisions if decision.kind == LEARNER_RANKS]


def devices_over_time(trace: Trace) -> list[int]:
    """The number of devices that each of the learner's replicas is billed for, in the order of their starts."""
    check_holdings(trace.holdings)
    serving = [row for row in trace.holdings if row.state is ReplicaState.SERVING]
    replicas = dict.fromkeys(row.replica for row in sorted(serving, key=lambda row: row.start_s))
    return [len({row.device for row in serving if row.replica == replica}) for replica in replicas]


@pytest.fixture(scope="module")
def fixed(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A run whose learner has two ranks from its start to its end."""
    return driven(opening(assets, tmp_path_factory.mktemp("fixed") / "run"))[1]


@pytest.mark.seldom
def test_from_two_ranks_to_one_and_back_through_shared_memory(
    fixed: Trace, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = iter([None, 1, None, None, 2, None, None])  # after steps 1 to 7

    async def larger(size: LearnerSize) -> Allocation | None:
        ranks = next(wanted)
        return None if ranks is None else size._candidates[ranks][0]

    monkeypatch.setattr(LearnerSize, "larger", larger)
    recovered, trace = driven(opening(assets, tmp_path / "run", min_ranks=1, ema_decay=0.9))
    assert recovered == Recovered(0, 0)
    assert_alike(trace, fixed)
    made = changes(trace)
    assert [(each.step, each.inputs["before"], each.choice) for each in made] == [(2, 2, "1"), (5, 1, "2")]
    assert {each.inputs["through"] for each in made} == {"shared memory"}
    assert devices_over_time(trace) == [2, 1, 2]


def test_a_lost_device_leaves_a_learner_of_one_rank_which_grows_again(
    fixed: Trace, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = asyncio.Event()

    async def lose(run: BaseRun) -> None:
        await saboteur.until(lambda: run.ledger.has_step(3))
        size = run.learner_size
        assert isinstance(size, LearnerSize)
        there = size._devices.at_hand

        async def without(*_: Any) -> Any:
            """The core of the rank that was killed is not there until step 6 has ended."""
            free = await there()
            return lambda allocation: free(allocation) and (gone.is_set() or len(allocation.devices) == 1)

        size._devices.at_hand = without  # type: ignore[method-assign]
        (learner,) = run.learner.replicas()
        assert learner.info is not None
        os.kill(learner.info.pids[1], signal.SIGKILL)
        await saboteur.until(lambda: run.ledger.has_step(6))
        gone.set()

    recovered, trace = driven(opening(assets, tmp_path / "run", min_ranks=1), lose)
    assert recovered.replicas_lost == 1
    assert_alike(trace, fixed)
    lost, grown = changes(trace)
    assert (lost.inputs["before"], lost.choice) == (2, "1")
    assert "the most ranks whose devices are there" in str(lost.inputs["reason"])
    assert (grown.inputs["before"], grown.choice) == (1, "2")
    assert grown.step >= 6
    assert devices_over_time(trace) == [2, 1, 2]
