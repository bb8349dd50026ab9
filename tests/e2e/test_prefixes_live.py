"""Shared prefixes in a live run: each actor computes the prefix of a step once, and a replay of the trace has the same
token counts."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from pathlib import Path

import pytest

from fakes.live_runs import spec_values, write_prompts
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.session import Session
from rlhfless.planning.preflight import preflight
from rlhfless.records import FunctionName, Work
from rlhfless.records.traces import read_trace
from rlhfless.sim.replay.calibrate import calibrate
from rlhfless.sim.replay.replay import replay
from rlhfless.sim.workloads.recorded import read_runtime
from rlhfless.spec import RunSpec
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.sinks import MetricSinks

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

STEPS, CALIBRATED, ACTORS = 4, 2, 2
"""Steps, how many of them only calibrate the replay, and actors."""


def test_a_prefix_is_computed_once_and_the_replay_counts_its_tokens(assets: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path / "train.jsonl")
    spec = RunSpec.model_validate(
        spec_values(
            assets,
            prompts={"path": str(tmp_path / "train.jsonl")},
            generation={"max_tokens": 150},
            weights={},
            steps=STEPS,
            scaling={
                "policy": {"type": "static"},
                "generation": {"min_actors": ACTORS, "max_actors": ACTORS},
            },
        )
    )
    folder = tmp_path / "run"
    folder.mkdir()
    console = Console("lines", "prefixes", spec.steps, stream=io.StringIO())
    asyncio.run(execute(Session(preflight(spec), "prefixes-1", folder, console, MetricSinks([]))))
    trace = read_trace(folder / "trace")
    ahead = [call for call in trace.invocations if call.work is Work.PRECOMPUTE]
    # Every step has a new weight version, and the KV of an earlier one is never used.
    assert Counter((call.replica, call.step) for call in ahead) == Counter(
        (f"prefixes-1-generation-{actor}", step) for actor in range(ACTORS) for step in range(1, STEPS + 1)
    )
    assert {(call.input_tokens > 256, call.cached_tokens) for call in ahead} == {(True, 0)}
    assert len({call.input_tokens for call in ahead}) == 1, "all prompts have the same prefix"

    again = replay(trace, read_runtime(folder / "trace")[CALIBRATED:], calibrate([trace]))
    found = {each.function: each for each in again.prompt_tokens}
    learner, generation = found[FunctionName.LEARNER], found[FunctionName.GENERATION]
    assert learner.predicted == pytest.approx(learner.measured, rel=1e-6)
    assert generation.predicted == pytest.approx(generation.measured, rel=0.05)
    # The reference computes a prefix once in each call, and how many groups a call has depends on when they end: all of
    # them, or each by itself.
    reference = found[FunctionName.REFERENCE]
    assert all(1 <= times < 16 for times in (reference.predicted, reference.measured))
