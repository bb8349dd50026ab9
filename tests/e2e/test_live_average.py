"""A run that keeps an average of its weights: evaluations draw with it, and steps draw and learn as without it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fakes.live_runs import Whole, fault_opening
from rlhfless.loop.driver import execute
from rlhfless.records import Work
from rlhfless.records.compare import compare_samples
from rlhfless.records.traces import read_trace

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]


STEPS = 4


def test_steps_are_as_without_the_average_that_evaluations_load(assets: Path, whole: Whole, tmp_path: Path) -> None:
    start = fault_opening(
        assets, tmp_path, actors=1, steps=STEPS, learner={"ema_decay": 0.5}, evaluation={"every_steps": 2},
    )  # fmt: skip
    outcome = asyncio.run(execute(start))
    trace, newest = read_trace(tmp_path / "trace"), start.checkpoints.newest()
    assert newest is not None
    assert newest.notes.digest == whole.digest_after(STEPS), "of the weights that learn"
    same = compare_samples(trace, whole.trace)
    assert (same.fraction, same.only_in_first) == (1.0, 0)

    loads = [call for call in trace.invocations if call.work is Work.LOAD_WEIGHTS]
    # The versions of the steps, and for each of the evaluations after 2 and 4 steps another one.
    assert len({call.version for call in loads}) >= STEPS + 2
    evaluated = {call.version for call in trace.invocations if call.work is Work.HELD_OUT and call.step}
    drawn = {call.version for call in trace.invocations if call.work is Work.GENERATE}
    assert evaluated
    assert not evaluated & drawn
    assert outcome.after != outcome.before

    exported = load_file(Path(outcome.checkpoint) / "model.safetensors")
    initial = load_file(assets / "model" / "model.safetensors")
    name = next(name for name in exported if name.endswith("up_proj.weight"))
    assert np.abs(exported[name] - initial[name]).max() > 0
