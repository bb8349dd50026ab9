"""Speeds are learned per kind of device, live and from a trace alike."""

from __future__ import annotations

import pytest

from fakes.builders import TOKENS, timed
from rlhfless.records import FunctionName, Holding, Invocation, ReplicaState, Work
from rlhfless.records.traces import Trace, TraceMeta
from rlhfless.scaling.latency.devices import load_devices
from rlhfless.scaling.latency.fitted import STEPS_REPLAYED, EngineSpeeds, LatencyFit, prior_of
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape


def call(actor: str, step: int) -> Invocation:
    return Invocation(FunctionName.GENERATION, actor, "i", Work.GENERATE, step, 0.0, 100.0)


def held(actor: str, kind: str) -> Holding:
    return Holding(FunctionName.GENERATION, actor, "i", "device", kind, 1.0, ReplicaState.SERVING, 0.0, 100.0)


STEP = 3
CALLS = [call("fast", STEP), call("slow", STEP)]
# Sixteen samples side by side, all of a length: an iteration of 16 took so long.
ROLLOUTS = [timed(actor, STEP, i, token_s) for actor, token_s in (("fast", 0.01), ("slow", 0.04)) for i in range(16)]


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


def test_an_actor_that_only_computes_prompts_teaches_their_price() -> None:
    """Two calls at once, of ten prompts each: 3,000 new tokens in 0.3 s. One that also generates teaches nothing by
    them: it may have taken the KV of others."""
    speeds = EngineSpeeds(None, 1, 256)
    kinds = {"apart": "quick", "draws": "slow"}

    def computed(actor: str, tokens: int, end_s: float) -> Invocation:
        usage = {"input_tokens": tokens + 500, "cached_tokens": 500, "sequences": 10}
        return Invocation(FunctionName.PREFILL, actor, "i", Work.PRECOMPUTE, STEP, 0.0, end_s, **usage)

    before = speeds.model("slow").prefill_s(100)
    for _ in range(20):
        calls = [computed("apart", 1000, 0.1), computed("apart", 2000, 0.3), computed("draws", 1000, 5.0)]
        speeds.learn([*calls, call("draws", STEP)], (), kinds)
    learned = speeds.model("quick")
    assert 10 * (learned.prefill_s(100, 50) + learned.prefill_s(200, 50)) == pytest.approx(0.3, rel=0.05)
    assert speeds.model("slow").prefill_s(100) == before


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
            timed(row.actor, step, row.sample_index, row.finished_s / TOKENS) for step in steps for row in ROLLOUTS
        ),
    )
    resumed.learn_trace(trace)
    assert resumed.model("quick") == live.model("quick")
    assert resumed.model("cpu-core") == live.model("cpu-core")


# -- what an engine is taken to do before anything was measured


# 2 x 1 layers x 8 x 4 x (2 + 2) = 256 of attention, 384 of the MLP, 8 x 10 = 80 of the head: 720 active.
SHAPE = ModelShape(
    layers=1,
    hidden=8,
    heads=2,
    kv_heads=2,
    head_dim=4,
    vocabulary=10,
    dense_mlp=384,
    expert_mlp=0,
    experts=0,
    experts_per_token=0,
    tied=True,
    weight_bytes=4,
)


def test_an_accelerator_has_its_data_sheet_and_one_without_the_slowest() -> None:
    devices = load_devices()
    assert prior_of("h100", SHAPE, 2) == Roofline(SHAPE, devices["h100"], 2)
    assert prior_of("a kind of one's own", SHAPE) == Roofline(SHAPE, devices["l4"])
    accelerators = [device for device in devices.values() if device.kind != "cpu-core"]
    assert min(accelerators, key=lambda device: device.memory_bytes_per_s.value).kind == "l4"


def test_on_a_core_the_engines_own_work_comes_on_top() -> None:
    core, sheet = prior_of("cpu-core", SHAPE), Roofline(SHAPE, load_devices()["cpu-core"])
    # 9 ms and 0.18 ms a sequence; the model itself takes microseconds.
    assert core.iteration_s(1) == pytest.approx(0.00918 + sheet.iteration_s(1))
    assert core.iteration_s(128) == pytest.approx(0.009 + 128 * 1.8e-4 + sheet.iteration_s(128))
    assert core.prefill_s(2048) == pytest.approx(sheet.prefill_s(2048))


@pytest.mark.parametrize("kind", ["cpu-core", "h100"])
def test_of_a_model_of_unknown_shape_more_sequences_still_take_longer(kind: str) -> None:
    prior = prior_of(kind, None)
    assert prior.iteration_s(1) < prior.iteration_s(200) < 200 * prior.iteration_s(1)


@pytest.mark.parametrize("shape", [SHAPE, None])
def test_a_fit_begins_with_it(shape: ModelShape | None) -> None:
    prior = prior_of("cpu-core", shape)
    model = LatencyFit(prior).model()
    assert model.iteration_s(64) == pytest.approx(prior.iteration_s(64))
    assert model.prefill_s(100) == pytest.approx(prior.prefill_s(100), rel=0.05)
