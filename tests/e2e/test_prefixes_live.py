"""Shared prefixes in a live run: an actor that takes a tail gets the KV of its prefix from the actor that has it; and
the trace says as many prompt tokens computed and unique as its replay does."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fakes.live_runs import spec_values, write_prompts
from rlhfless.orchestrator import scaler
from rlhfless.orchestrator.driver import execute
from rlhfless.orchestrator.session import Session
from rlhfless.planning.preflight import preflight
from rlhfless.prefixes.precompute import CPU_BLOCK_TOKENS
from rlhfless.records import FunctionName, Work
from rlhfless.records.traces import read_trace
from rlhfless.scaling.engine_speeds import PrefixMoves
from rlhfless.scaling.policies.fleet import Contexts, assign_groups, start
from rlhfless.scaling.policy import Action, Event, Heartbeat, Move, StepBegan, StepView
from rlhfless.sim.replay.calibrate import calibrate
from rlhfless.sim.replay.replay import replay
from rlhfless.sim.workloads.recorded import read_runtime
from rlhfless.spec import RunSpec
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.sinks import MetricSinks

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

STEPS, MOVED = 5, 3
"""Steps, and how many of them move a tail."""


class TailMover:
    """Begins each step with the first actor alone, and gives half of what it draws to the second one at a heartbeat; in
    the last steps it does not."""

    def __init__(self) -> None:
        self._contexts, self._moved = Contexts(), True

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        now = self._contexts.of(at_s, view)
        first, second = now.layout.generation
        if isinstance(event, StepBegan):
            self._moved = False
            return [*start(now, [slot for slot in (first, second) if now.absent(slot)]), *assign_groups(now, [first])]
        drawn = np.flatnonzero((view.home == first) & ~view.finished & (view.tokens > 0))
        if (
            isinstance(event, Heartbeat)
            and view.step <= MOVED
            and not self._moved
            and now.awake(second)
            and drawn.size > 1
        ):
            self._moved = True
            return [Move(first, second, drawn[::2])]
        return []


def test_a_tail_gets_its_prefix_and_the_replay_knows_it(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_prompts(tmp_path / "train.jsonl")
    monkeypatch.setattr(scaler, "policy_of", lambda *_: TailMover())
    # So small a model computes a prefix sooner than two calls move it.
    monkeypatch.setattr(PrefixMoves, "pay", lambda *_: True)
    spec = RunSpec.model_validate(
        spec_values(
            assets,
            prompts={"path": str(tmp_path / "train.jsonl")},
            generation={"max_tokens": 150, "progress_interval_s": 0.05, "engine": {"kv_connector": "folder"}},
            weights={},
            steps=STEPS,
            scaling={"generation": {"min_actors": 2, "max_actors": 2}},
        )
    )
    folder = tmp_path / "run"
    folder.mkdir()
    console = Console("lines", "prefixes", spec.steps, stream=io.StringIO())
    asyncio.run(execute(Session(spec, preflight(spec), "prefixes-1", folder, console, MetricSinks([]))))
    trace = read_trace(folder / "trace")
    ahead = [call for call in trace.invocations if call.work is Work.PRECOMPUTE]
    first = [call for call in ahead if call.replica.endswith("-0") and not call.cached_tokens]
    assert {call.step for call in first} == set(range(1, STEPS + 1)), "each weight version's prefix is computed once"
    taken = [call for call in ahead if call.replica.endswith("-1")]
    assert taken, "no tail was moved"
    for call in taken:
        computed = min(other.input_tokens for other in first if other.step == call.step)
        assert call.input_tokens == computed > 256
        assert call.input_tokens - call.cached_tokens <= CPU_BLOCK_TOKENS

    again = replay(trace, read_runtime(folder / "trace")[MOVED:], calibrate([trace]))
    found = {each.function: each for each in again.prompt_tokens}
    learner, generation = found[FunctionName.LEARNER], found[FunctionName.GENERATION]
    assert learner.predicted == pytest.approx(learner.measured, rel=1e-6)
    assert generation.predicted == pytest.approx(generation.measured, rel=0.05)
    # The reference computes a prefix once in each call, and how many groups a call has depends on when they end: all of
    # them, or each by itself.
    reference = found[FunctionName.REFERENCE]
    assert all(1 <= times < 16 for times in (reference.predicted, reference.measured))
