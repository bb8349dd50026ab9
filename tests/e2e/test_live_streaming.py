"""Learning that begins while a step is drawn, with real Ray, vLLM and torch: the update is that of whole batches, and a
learner that is lost meanwhile costs no sample."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fakes import saboteur
from fakes.live_runs import fault_opening, tokens_of
from rlhfless.loop.driver import execute
from rlhfless.loop.run import Run
from rlhfless.loop.session import Session
from rlhfless.records import Work
from rlhfless.records.traces import Trace, read_trace

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]

STEPS = 3


def opening(assets: Path, folder: Path, *, streaming: bool) -> Session:
    """Weights move by the gradient itself, so that its last bits are not made into steps of their own."""
    folder.mkdir()
    return fault_opening(
        assets,
        folder,
        actors=1,
        steps=STEPS,
        mini_batches=1,
        schedule={"type": "sync", "streaming": streaming},
        placement={"mode": "disaggregated", "devices": 2, "learner_devices": 1},
        optimizer={"learning_rate": 0.1, "eps": 1.0},
        checkpoint={"every_steps": 1},
    )


def weights_of(start: Session) -> dict[str, Any]:
    return load_file(Path(start.checkpoints.location(STEPS)) / "model.safetensors")


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, atol=1e-5, rtol=0, err_msg=name)


def learned_while_drawn(trace: Trace, step: int) -> int:
    """Calls of the learner that ended before the step was drawn."""
    drawn_s = max(call.end_s for call in trace.invocations if call.step == step and call.work is Work.GENERATE)
    learns = [call for call in trace.invocations if call.step == step and call.work is Work.LEARN]
    return sum(call.end_s < drawn_s for call in learns)


async def kill_learner_with_parts(run: Run) -> None:
    """Once it has added up a part of step 2 that is not the last."""

    def has_parts() -> bool:
        context = run.under_way.get(2)
        return context is not None and context.streaming is not None and context.streaming.sent > 0

    await saboteur.until(has_parts, 600)
    await saboteur.kill_learner(run)


def test_streaming_learns_as_whole_batches_do_and_a_learner_that_is_lost_costs_no_sample(
    assets: Path, tmp_path: Path
) -> None:
    whole = opening(assets, tmp_path / "whole", streaming=False)
    asyncio.run(execute(whole))
    broken = opening(assets, tmp_path / "broken", streaming=True)
    recovered, _ = asyncio.run(saboteur.drive(broken, kill_learner_with_parts))
    assert recovered.replicas_lost == 1
    assert recovered.steps_again >= 1
    before, again = read_trace(whole.folder / "trace"), read_trace(broken.folder / "trace")
    assert set(Counter((row.step, row.prompt_id, row.sample_index) for row in again.rollouts).values()) == {1}
    assert tokens_of(again) == tokens_of(before)
    begun = [call for call in again.invocations if call.step == 2 and call.work is Work.GENERATE]
    assert len(begun) == 1, "the rollout of step 2 went on"
    check_same(weights_of(whole), weights_of(broken))
    assert not any(learned_while_drawn(before, step) for step in range(1, STEPS + 1))
    assert sum(learned_while_drawn(again, step) for step in (1, 3)) > 0
    for one, other in zip(before.steps, again.steps, strict=True):
        for name in ("loss", "gradient_norm", "entropy", "rollout_kl"):
            assert other.metrics[name] == pytest.approx(one.metrics[name], rel=1e-3, abs=1e-6), name
