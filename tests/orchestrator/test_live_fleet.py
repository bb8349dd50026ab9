"""A policy's view of a live fleet (allocations, prices, measured times), and the actions that it may take."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.fake_run import SPEC, Fleet, draw, until
from rlhfless.functions.calls import ReplicaInfo
from rlhfless.orchestrator.engine_starts import EngineStarts
from rlhfless.orchestrator.in_flight_samples import InFlightSamples
from rlhfless.records import Decision, FunctionName, Holding, Invocation, ReplicaState, Work
from rlhfless.scaling.assignment import PolicyFault
from rlhfless.scaling.function_specs import Bounds
from rlhfless.scaling.latency.roofline import START_S
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.scaling.prices import Acquired
from rlhfless.spec import RunSpec


def table() -> InFlightSamples:
    return InFlightSamples(draw("pq"), SPEC, slots=2)


def starting(name: str, function: FunctionName, end_s: float) -> Holding:
    return Holding(function, name, name, "cpu-0", CPU_KIND, 1.0, ReplicaState.STARTING, 0.0, end_s)


def loading(seconds: float) -> Invocation:
    return Invocation(FunctionName.GENERATION, "a", "i", Work.LOAD_WEIGHTS, 1, 50.0, 50.0 + seconds)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache folder for this test."""
    monkeypatch.setenv("RLHFLESS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


async def test_slots_are_allocations_with_prices_and_the_times_of_the_ledger(tmp_path: Path) -> None:
    scene = Fleet(tmp_path)
    first = scene.fleet.view()
    assert [replica_slot.function for replica_slot in first.replica_slots] == [
        "generation",
        "generation",
        "scoring",
        "learner",
    ]
    assert first.replica_slots[0].start_s == START_S  # nothing has been measured yet
    assert first.load_s == 0.0
    for holding in (
        starting("a", FunctionName.GENERATION, 20.0),
        starting("b", FunctionName.GENERATION, 30.0),
        starting("s", FunctionName.SCORING, 4.0),
    ):
        scene.ledger.add_holding(holding)
    for seconds in (0.25, 0.75):
        scene.ledger.add_invocation(loading(seconds))
    view = scene.fleet.view()
    assert [replica_slot.start_s for replica_slot in view.replica_slots] == [25.0, 25.0, 4.0, START_S]
    assert [replica_slot.usd_per_s for replica_slot in view.replica_slots] == [0.01, 0.01, 0.005, 0.0]
    assert view.kept_usd_per_s == 0.005  # the learner's share of its core
    assert (view.load_s, view.max_tokens, view.heartbeat_s) == (0.5, 64, 0.5)
    assert [replica_slot.devices for replica_slot in view.replica_slots] == [
        ("cpu-0",),
        ("cpu-1",),
        ("cpu-2",),
        ("cpu-2",),
    ]


async def test_a_wake_up_is_no_cold_start(tmp_path: Path) -> None:
    scene = Fleet(tmp_path)
    for begin_s, end_s in ((0.0, 12.0), (12.0, 20.0), (100.0, 101.0)):  # a flush of the ledger splits the first
        holding = starting("s", FunctionName.SCORING, end_s)
        scene.ledger.add_holding(replace(holding, start_s=begin_s))
    assert scene.fleet.view().replica_slots[2].start_s == 20.0


async def test_engines_say_what_they_hold_and_until_then_their_sequences_bound_them(tmp_path: Path) -> None:
    scene = Fleet(tmp_path)
    engine = scene.fleet.view().replica_slots[1].engine
    assert engine is not None
    assert (engine.kv_capacity_tokens, engine.max_sequences) == (5000, 256)
    scene.actors["a"].info = ReplicaInfo("a-1", 1, "here")
    engine = scene.fleet.view().replica_slots[0].engine
    assert engine is not None
    assert engine.kv_capacity_tokens == 256 * 100


async def test_a_fleet_that_never_changes_has_nothing_to_save(tmp_path: Path) -> None:
    assert [replica_slot.usd_per_s for replica_slot in Fleet(tmp_path, fewest=2).fleet.view().replica_slots] == [
        0.0,
        0.0,
        0.005,
        0.0,
    ]


async def test_slots_show_their_replicas_and_how_much_each_has(tmp_path: Path) -> None:
    scene, seen = Fleet(tmp_path), table()
    seen.give(np.array([0, 1, 2]), 0)
    seen.give(np.array([3]), 1)
    for number in range(3):
        seen.request_of[number] = 0
    seen.apply_heartbeat(0, {("p", 0): 4}, {})
    slots = scene.fleet.slots(seen)
    assert [slot.state for slot in slots] == [ReplicaState.SERVING, None, ReplicaState.SERVING, ReplicaState.SERVING]
    assert [(slot.running, slot.waiting) for slot in slots[:2]] == [(1, 2), (0, 1)]
    assert [scene.fleet.expects(slot) for slot in range(4)] == [True, False, False, False]


async def test_a_helper_is_released_and_started_ahead_of_its_next_use(tmp_path: Path) -> None:
    scene = Fleet(tmp_path)
    (slot,) = scene.fleet.slots_of(FunctionName.SCORING)
    scene.fleet.release(slot, 3)
    assert scene.scoring["scoring"].state is ReplicaState.DRAINING
    scene.fleet.start(slot, time.time() + 0.02, 4)
    await until(lambda: scene.cluster.begun == [0])
    await scene.scoring.close()


async def test_a_helper_that_the_spec_always_holds_stays_and_the_ledger_says_so(tmp_path: Path) -> None:
    scene = Fleet(tmp_path, hold=Bounds(1, reason="scaling.hold_scoring is always"))
    scene.fleet.release(2, 3)
    assert scene.scoring.serving()
    (kept,) = scene.decisions()
    assert (kept.kind, kept.inputs) == ("keep", {"function": "scoring", "reason": "scaling.hold_scoring is always"})


async def test_a_helper_that_the_spec_never_holds_is_released_whatever_the_policy_wants(tmp_path: Path) -> None:
    scene = Fleet(tmp_path, hold=Bounds(idle=False, reason="scaling.hold_scoring is never"))
    scene.fleet.idle(2, 3)
    scene.fleet.idle(2, 3)  # it is already leaving
    assert scene.scoring["scoring"].state is ReplicaState.DRAINING
    (released,) = scene.decisions()
    assert released.kind == "release"
    assert released.inputs == {"function": "scoring", "reason": "scaling.hold_scoring is never"}
    await scene.scoring.close()


async def test_a_helper_that_the_policy_may_keep_stays_if_it_says_nothing(tmp_path: Path) -> None:
    scene = Fleet(tmp_path)
    scene.fleet.idle(2, 3)
    assert scene.scoring.serving()
    assert scene.decisions() == []


async def test_the_fewest_actors_stay_and_the_ledger_says_so(tmp_path: Path) -> None:
    scene = Fleet(tmp_path)
    scene.fleet.release(0, 3)
    assert scene.actors["a"].state is ReplicaState.SERVING
    (kept,) = scene.decisions()
    assert (kept.step, kept.kind, kept.choice) == (3, "keep", "slot 0 stays")


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        (lambda fleet: fleet.release(1, 3), "slot 1 is released, and has no actor"),
        (lambda fleet: fleet.release(3, 3), "its learner keeps the run's state"),
        (lambda fleet: fleet.start(0, None, 3), r"slot 0 is asked to start, and has an actor \(serving\)"),
    ],
)
async def test_what_cannot_be_done_is_a_fault_of_the_policy(tmp_path: Path, asked: Any, fault: str) -> None:
    with pytest.raises(PolicyFault, match=fault):
        asked(Fleet(tmp_path).fleet)


async def test_a_start_waits_for_devices_that_have_to_come_as_long_as_such_have_taken(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.actors._devices.to_come = {"cpu-1"}
    assert [slot.reacquire_s for slot in fleet.fleet.view().replica_slots][:2] == [0.0, 0.0]
    fleet.ledger.add_acquired(Acquired(CPU_KIND, 1, 100.0, 340.0, node_came=True))
    # The first actor's core is held; the node of the second actor's core took 240 s last time.
    assert [slot.reacquire_s for slot in fleet.fleet.view().replica_slots][:2] == [0.0, 240.0]
    assert [row.choice for row in fleet.decisions()] == ["1 x cpu-core"]


async def test_a_second_run_expects_the_start_that_the_first_has_measured(tmp_path: Path) -> None:
    first = Fleet(tmp_path / "first")
    first.fleet.keep_starts()  # nothing to keep yet
    assert first.fleet.view().replica_slots[0].start_s == START_S
    for seconds in ({"import_s": 20.0, "compile_s": 60.0}, {"import_s": 40.0}):
        first.ledger.add_decision(Decision(0, 1.0, "start", "a", seconds))  # type: ignore[arg-type]
    first.fleet.keep_starts()
    second = Fleet(tmp_path / "second")
    slots = second.fleet.view().replica_slots
    assert [slot.start_s for slot in slots] == [60.0, 60.0, START_S, START_S]
    second.ledger.add_decision(Decision(0, 1.0, "start", "a", {"import_s": 20.0, "graphs_s": 8.0}))
    second.fleet.keep_starts()
    third = EngineStarts(second.spec, None).expected(CPU_KIND)
    assert third == {"import": 25.0, "compile": 15.0, "graphs": 4.0}


async def test_a_load_is_no_part_of_a_start(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.ledger.add_holding(starting("a", FunctionName.GENERATION, 80.0))
    fleet.ledger.add_invocation(loading(2.0))
    view = fleet.fleet.view()
    assert (view.replica_slots[0].start_s, view.load_s) == (80.0, 2.0)


async def test_kept_starts_that_cannot_be_read_are_as_none(tmp_path: Path, home: Path) -> None:
    home.mkdir()
    (home / "starts.json").write_text("{")
    assert Fleet(tmp_path / "run").fleet.view().replica_slots[0].start_s == START_S


def test_the_prior_of_a_gpu_knows_compilation_and_the_models_own_weights() -> None:
    config = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
              "num_key_value_heads": 4, "vocab_size": 152064, "torch_dtype": "bfloat16"}  # fmt: skip
    shape = ModelShape.of_config(config)
    spec = RunSpec.model_validate(
        {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
    )
    expected_s = EngineStarts(spec, shape).expected_s("h100")
    assert expected_s == pytest.approx(33.7 + 0.81 * 7.6 + 60 + 15.2 / 1.75, rel=0.02)
    assert EngineStarts(spec, shape).expected("h100").keys() == {"build", "weights_disk", "compile", "graphs"}
    assert EngineStarts(spec, None).expected_s("h100") == START_S
