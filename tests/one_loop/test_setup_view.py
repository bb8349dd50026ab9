"""A policy's view of a simulated fleet is the live fleet's, of the slots of a setup."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from fakes.naive_engine import LinearModel
from fakes.tiny_scenario import FOLDER, LEARNER, PRICES, SCORING, actor, batch_of, on, setup_of, slot_setup
from fakes.views import Scripted
from rlhfless.records import FunctionName
from rlhfless.scaling.fleet_constants import MOVE_S
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.scaling.policy import Action, Event, FleetView, StepBegan, StepView
from rlhfless.scaling.prices import RentalTerms
from rlhfless.sim.run import simulate
from rlhfless.sim.setup import Setup


def views(setup: Setup, steps: int = 1) -> list[FleetView]:
    """Return the fleet at the start of each step."""
    seen: list[FleetView] = []

    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        if isinstance(event, StepBegan):
            seen.append(view.fleet)
        return ()

    batch = batch_of([(5, [20]), (5, [20])])
    batches = [dataclasses.replace(batch, step=step) for step in range(1, steps + 1)]
    simulate(setup, Scripted(answer), PRICES, batches)
    return seen


def test_a_learner_on_the_actors_devices_pays_for_them_whatever_is_released() -> None:
    eight = Allocation.of([Device(f"h100-{i}", "h100", i) for i in range(8)])
    (view,) = views(setup_of(actor(0), actor(1), learner=on(LEARNER, slot_setup(0, allocation=eight))))
    assert view.generation() == (0, 1)
    assert [slot.function for slot in view.replica_slots[2:]] == [FunctionName.SCORING, FunctionName.LEARNER]
    assert [slot.usd_per_s for slot in view.replica_slots] == pytest.approx([0.0, 0.0, 0.00001, 0.0])
    assert view.kept_usd_per_s == pytest.approx(8 * 0.001)
    assert view.replica_slots[3].devices == tuple(f"h100-{i}" for i in range(8))
    assert (view.load_s, view.move_s, view.heartbeat_s, view.max_tokens) == (pytest.approx(0.3), MOVE_S.value, 0.5, 200)
    engine = view.replica_slots[0].engine
    assert engine is not None
    assert (engine.kv_capacity_tokens, engine.max_sequences) == (240, 8)
    assert isinstance(engine.model, LinearModel)


def test_actors_on_devices_of_their_own_save_their_price() -> None:
    (view,) = views(setup_of(actor(0), actor(1), learner=on(LEARNER, slot_setup(2))))
    assert [slot.usd_per_s for slot in view.replica_slots[:2]] == pytest.approx([0.001, 0.001])
    assert view.kept_usd_per_s == pytest.approx(0.001)


def test_beside_a_learner_that_has_a_part_of_a_device_another_function_saves_its_own_part() -> None:
    device = Device("h100-2", "h100", 2)
    learner, part = (slot_setup(2, allocation=Allocation.of([device], share), beside=True) for share in (0.75, 0.25))
    setup = setup_of(actor(0), services=(on(SCORING, part),), learner=on(LEARNER, learner))
    (view,) = views(setup)
    assert [slot.usd_per_s for slot in view.replica_slots] == pytest.approx([0.001, 0.00025, 0.0])
    assert view.kept_usd_per_s == pytest.approx(0.00075)


def test_a_learner_that_gives_its_devices_back_is_paid_for_by_its_work() -> None:
    learner = dataclasses.replace(on(LEARNER, slot_setup(2)), paid_around=(1.0, 0.5))
    (view,) = views(setup_of(actor(0), learner=learner))
    assert view.replica_slots[2].usd_per_s == view.kept_usd_per_s == 0.0


def test_times_are_those_of_the_setup_until_they_are_measured() -> None:
    """A node comes 5 s after it is asked for the first time, and stays. Only the learner's node needs no pull."""
    pulled = dataclasses.replace(FOLDER, home="node-0", pull_bytes_per_s=5e8)
    setup = setup_of(actor(1), actor(2), transport=pulled, terms=RentalTerms(60.0, 60.0, 7.0))
    first, second = views(setup, steps=2)
    assert [slot.reacquire_s for slot in first.replica_slots[:2]] == [5.0, 5.0]
    assert [slot.reacquire_s for slot in second.replica_slots[:2]] == [0.0, 0.0]
    assert [slot.start_s for slot in first.replica_slots[:2]] == [2.0, 2.0]
    assert [slot.start_s for slot in second.replica_slots[:2]] == pytest.approx([2.0, 2.0])
    assert first.load_s == pytest.approx(0.3 + 2 * 0.4)
    assert second.load_s == pytest.approx((0.3 + 0.4 + 0.3 + 0.8) / 2), "the mean of the measured loads"
    assert first.terms == second.terms == RentalTerms(60.0, 60.0, 7.0)
