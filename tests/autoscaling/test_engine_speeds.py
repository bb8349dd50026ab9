"""Speeds are learned per kind of device, live and from a trace alike."""

from __future__ import annotations

import pytest

from fakes.traced import TOKENS, rollout
from rlhfless.autoscaling.engine_speeds import STEPS_REPLAYED, EngineSpeeds
from rlhfless.records import FunctionName, Holding, Invocation, ReplicaState, Work
from rlhfless.records.traces import Trace, TraceMeta


def call(actor: str, step: int) -> Invocation:
    return Invocation(FunctionName.GENERATION, actor, "i", Work.GENERATE, step, 0.0, 100.0)


def held(actor: str, kind: str) -> Holding:
    return Holding(FunctionName.GENERATION, actor, "i", "device", kind, 1.0, ReplicaState.SERVING, 0.0, 100.0)


STEP = 3
CALLS = [call("fast", STEP), call("slow", STEP)]
# Sixteen samples side by side, all of a length: an iteration of 16 took so long.
ROLLOUTS = [rollout(actor, STEP, i, token_s) for actor, token_s in (("fast", 0.01), ("slow", 0.04)) for i in range(16)]


def test_each_kind_has_its_own_speed() -> None:
    speeds = EngineSpeeds(None, 1, 256)
    assert speeds.model("quick").iteration_s(16) == speeds.model("cpu-core").iteration_s(16)  # the prior
    for _ in range(20):
        speeds.learn(CALLS, ROLLOUTS, {"fast": "quick", "slow": "cpu-core"})
    assert speeds.model("quick").iteration_s(16) == pytest.approx(0.01, rel=0.05)
    assert speeds.model("cpu-core").iteration_s(16) == pytest.approx(0.04, rel=0.05)


def test_rollouts_of_actors_that_are_gone_teach_nothing() -> None:
    speeds = EngineSpeeds(None, 1, 256)
    before = speeds.model("quick")
    speeds.learn(CALLS, ROLLOUTS, {"other": "quick"})
    assert speeds.model("quick") == before


def test_a_resumed_run_knows_what_its_trace_knows() -> None:
    kinds = {"fast": "quick", "slow": "cpu-core"}
    live, resumed = EngineSpeeds(None, 1, 256), EngineSpeeds(None, 1, 256)
    for _ in range(STEPS_REPLAYED):
        live.learn(CALLS, ROLLOUTS, kinds)
    steps = range(1, STEPS_REPLAYED + 5)  # the first ones are forgotten
    trace = Trace(
        meta=TraceMeta("run", 1, {}, {}, {}),
        holdings=tuple(held(actor, kind) for actor, kind in kinds.items()),
        invocations=tuple(call(actor, step) for step in steps for actor in kinds),
        rollouts=tuple(
            rollout(row.actor, step, row.sample_index, row.finished_s / TOKENS) for step in steps for row in ROLLOUTS
        ),
    )
    resumed.learn_trace(trace)
    assert resumed.model("quick") == live.model("quick")
    assert resumed.model("cpu-core") == live.model("cpu-core")
