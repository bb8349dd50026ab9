"""What a policy sees of the simulator, and which answers are faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from fakes.naive_engine import LinearModel
from fakes.tiny_scenario import (
    LEARNER,
    MODEL,
    SERVING_S,
    actor,
    batch_of,
    fleet_seen,
    on,
    one_step,
    play,
    repeated,
    setup_of,
    slot_setup,
)
from fakes.views import Evenly, Scripted
from rlhfless.records import FunctionName, ReplicaState
from rlhfless.scaling.engine_model import decode_s
from rlhfless.scaling.fleet_constants import MOVE_S
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.scaling.policy import (
    Action,
    Assign,
    Event,
    Generated,
    Heartbeat,
    Move,
    Release,
    Serving,
    Start,
    StepBegan,
    StepView,
)
from rlhfless.sim.strict import SimulationError


def test_what_a_policy_sees() -> None:
    """Tokens as they are generated, at every heartbeat from the step's start on; the end of a response only once it is
    there; and nothing to write to."""
    seen: list[tuple[float, int, bool, bool]] = []

    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        if isinstance(event, Heartbeat | Generated):
            seen.append((at_s, int(view.tokens[0]), bool(view.finished[0]), bool(view.truncated[0])))
            running = view.slots[0].running
            assert running == (view.tokens[0] > 0 and not view.finished[0])
        assert not view.tokens.flags.writeable
        return ()

    batch = dataclasses.replace(batch_of([(5, [200])]), truncated=np.array([True]))
    _, step = one_step(setup_of(actor(0)), Scripted(answer), batch)
    begun_s = SERVING_S + MODEL.prefill_s(5)
    for at_s, tokens, finished, truncated in seen[:-1]:
        assert not finished
        assert not truncated
        drawn = [k for k in range(200) if begun_s + decode_s(MODEL, 1, 6, k) <= at_s]
        assert tokens == len(drawn)
    assert seen[-1] == (step.end_s, 200, True, True)
    assert len(seen) > 10
    assert all(at_s == pytest.approx(0.5 * (i + 1)) for i, (at_s, *_) in enumerate(seen[:-1]))


def test_who_was_released_at_the_instant_it_came_up_is_not_told_of() -> None:
    told: list[int] = []

    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        if not isinstance(event, Serving):
            return ()
        told.append(event.slot)
        return [Release(1)]  # it has no samples: there is one group

    one_step(setup_of(actor(0), actor(1)), Scripted(answer), batch_of([(5, [20])]))
    assert told == [0]


def test_live_fleet_as_a_policy_sees_them() -> None:
    eight = Allocation.of([Device(f"h100-{i}", "h100", i) for i in range(8)])
    setup = setup_of(actor(0), actor(1), learner=on(LEARNER, slot_setup(0, allocation=eight)))
    view = fleet_seen(setup)
    assert view.generation() == (0, 1)
    assert [replica_slot.function for replica_slot in view.replica_slots[2:]] == [
        FunctionName.SCORING,
        FunctionName.LEARNER,
    ]
    assert (view.load_s, view.move_s, view.heartbeat_s, view.max_tokens) == (pytest.approx(0.3), MOVE_S.value, 0.5, 200)
    first, learner = view.replica_slots[0], view.replica_slots[3]
    # The learner is never released, and so its devices are paid for, whatever else is on them.
    assert (first.start_s, first.usd_per_s, view.replica_slots[1].usd_per_s, learner.usd_per_s) == (2.0, 0.0, 0.0, 0.0)
    assert view.kept_usd_per_s == pytest.approx(8 * 0.001)
    apart = fleet_seen(setup_of(actor(0), actor(1), learner=on(LEARNER, slot_setup(2))))
    assert [slot.usd_per_s for slot in apart.replica_slots[:2]] == pytest.approx([0.001, 0.001])
    assert apart.kept_usd_per_s == pytest.approx(0.001)
    assert first.engine.kv_capacity_tokens == 240
    assert isinstance(first.engine.model, LinearModel)
    assert learner.devices == tuple(f"h100-{i}" for i in range(8))


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Start(0), r"slot 0 is asked to start, and has an actor \(serving\)"),
        (Start(7), "there is no slot 7; the fleet has the slots 0 to 3"),
        (Release(7), "there is no slot 7"),
        (Release(3), "slot 3 is released, and its learner keeps the run's state"),
        (Release(0), "slot 0 is released with 1 samples; Move them first"),
        (Assign(1, np.array([0])), r"sample 0, given to slot 1, has ended, has a slot \(Move it\), or waits"),
        (Move(0, 3, np.array([0])), "slot 3 generates no samples; generation has the slots 0 to 1"),
        (Move(0, 1, np.array([0, 0])), "names a sample twice"),
    ],
)
def test_what_cannot_be_done_is_a_fault_of_the_policy(action: Action, reason: str) -> None:
    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        both = all(slot.state is ReplicaState.SERVING for slot in view.slots[:2])
        return (action,) if both and len(view.samples_at(0)) and not len(view.samples_at(1)) else ()

    with pytest.raises(SimulationError, match=reason):
        one_step(setup_of(actor(0), actor(1)), Scripted(answer), batch_of([(5, [150]), (5, [1])]))


def test_samples_without_a_slot_or_an_actor_are_faults() -> None:
    class Idler:
        def __init__(self, *answer: Action) -> None:
            self.answer = answer

        def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
            return self.answer if isinstance(event, StepBegan) else ()

    batch = batch_of([(5, [3, 3])])
    with pytest.raises(SimulationError, match="leaves 1 samples without a slot, such as 1"):
        one_step(setup_of(actor(0)), Idler(Start(0), Assign(0, np.array([0]))), batch)
    with pytest.raises(SimulationError, match="2 samples are left, and no actor serves or will"):
        one_step(setup_of(actor(0)), Idler(Assign(0, np.array([0, 1]))), batch)
    with pytest.raises(ValueError, match=r"a response of 201 tokens, above max_tokens \(200\)"):
        one_step(setup_of(actor(0)), Evenly(), batch_of([(5, [201])]))


def test_a_policy_sees_how_long_it_waits_for_nodes_that_have_to_come() -> None:
    """A node comes 5 s after it is asked for the first time, and stays."""
    seen: list[list[float]] = []

    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        if isinstance(event, StepBegan):
            seen.append([slot.reacquire_s for slot in view.fleet.replica_slots[:2]])
        return ()

    play(setup_of(actor(1), actor(2)), repeated(batch_of([(5, [20]), (5, [20])]), 2), Scripted(answer))
    assert seen == [[5.0, 5.0], [0.0, 0.0]]
