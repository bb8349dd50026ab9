"""Devices taken in turns, worked by hand: which replica waits for which, and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import pytest

from fakes.tiny_scenario import (
    LEARNER,
    PRICES,
    REFERENCE,
    SCORING,
    SLEEP_S,
    WAKE_S,
    actor,
    batch_of,
    called,
    on,
    one_step,
    setup_of,
    slot_setup,
)
from fakes.views import Evenly, Scripted
from rlhfless.records import ReplicaState, Work
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.scaling.policy import (
    Action,
    Event,
    Heartbeat,
    Idle,
    Release,
    StepView,
)
from rlhfless.sim.fleet import SimulationError
from rlhfless.sim.simulation import Simulation


def test_functions_take_turns_of_whole_phases() -> None:
    """The first group is complete early, and the reference waits until generation has ended: 0.25 s until the actor
    sleeps, 0.7 s of a cold start. In the second step the actor waits for the learner to fall asleep, and wakes, and the
    reference wakes."""
    setup = setup_of(actor(0), services=(REFERENCE,), learner=on(LEARNER, slot_setup(0, start_s=1.0)))
    simulation = Simulation(setup, Evenly(), PRICES)
    ends = []
    for step in (1, 2):
        generation = simulation.step(dataclasses.replace(batch_of([(5, [3]), (5, [200])]), step=step))
        ends.append(generation.end_s)
    first, second = called(simulation, Work.LOGPROBS)
    assert first.start_s == pytest.approx(ends[0] + SLEEP_S + 0.7)
    assert second.start_s == pytest.approx(ends[1] + SLEEP_S + WAKE_S)
    learned = called(simulation, Work.LEARN)
    assert learned[0].start_s == pytest.approx(first.end_s + SLEEP_S + 1.0)
    assert learned[1].start_s == pytest.approx(second.end_s + SLEEP_S + WAKE_S)
    drawn = called(simulation, Work.GENERATE)
    began_s = simulation.ledger.steps[1].start_s
    assert drawn[1].start_s == pytest.approx(began_s + SLEEP_S + WAKE_S + 0.3)  # and the load of the weights
    slots = {"generation-0", "reference-1", "learner-2"}
    awake = [
        row for row in simulation.close().holdings if row.replica in slots and row.state is not ReplicaState.SLEEPING
    ]
    spans = sorted((row.start_s, row.end_s) for row in awake)
    assert all(end_s <= start_s + 1e-9 for (_, end_s), (start_s, _) in pairwise(spans))  # one owner at a time


def test_a_released_actor_s_device_serves_while_the_tail_is_drawn() -> None:
    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        free = isinstance(event, Heartbeat) and view.slots[0].state is ReplicaState.SERVING
        return (Release(0),) if free and not len(view.samples_at(0)) else ()

    setup = setup_of(actor(0), actor(1), services=(REFERENCE,))
    simulation, generation = one_step(setup, Scripted(answer), batch_of([(5, [3]), (5, [200]), (5, [4])]))
    released_s = next(hold.end_s for hold in simulation.ledger.holdings if hold.state is ReplicaState.SERVING)
    first, last = called(simulation, Work.LOGPROBS)
    assert generation.progress.table.finish_s[2] < released_s < generation.end_s
    # It starts on demand, in the order in which groups became complete.
    assert (first.start_s, first.end_s) == pytest.approx((released_s + 0.7, released_s + 0.7 + 2 * 0.01))
    assert last.start_s == pytest.approx(generation.end_s)


def test_the_learner_is_never_released() -> None:
    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        return (Release(2),) if event == Idle(2) else ()

    setup = setup_of(actor(0), learner=on(LEARNER, slot_setup(0)))
    with pytest.raises(SimulationError, match=r"slot 2 \(learner\) keeps the run's state, and is never released"):
        one_step(setup, Scripted(answer), batch_of([(5, [3])]))


def test_a_service_beside_an_actor_does_not_wait() -> None:
    cores = {"allocation": Allocation.of([Device("cpu-core-0", "cpu-core", 0)], 0.5), "beside": True}
    shared = setup_of(
        actor(0, slot_setup=slot_setup(0, **cores)), services=(on(SCORING, slot_setup(0, start_s=0.7, **cores)),)
    )
    simulation, generation = one_step(shared, Evenly(), batch_of([(5, [3]), (5, [100])]))
    first = called(simulation, Work.SCORE)[0]
    assert first.start_s == pytest.approx(generation.progress.table.finish_s[0] + 0.7)
    whole = {"allocation": Allocation.of([Device("cpu-core-0", "cpu-core", 0)], 0.75), "beside": True}
    with pytest.raises(ValueError, match=r"shares of device 'cpu-core-0' add up to 1\.25; lower them"):
        dataclasses.replace(shared, services=(on(SCORING, slot_setup(0, **whole)),))


def test_a_device_that_is_used_in_turns_is_paid_for_once() -> None:
    """The actor sleeps while the learner is awake on its device, and the other way round."""
    simulation = Simulation(setup_of(actor(0), learner=on(LEARNER, slot_setup(0, start_s=1.0))), Evenly(), PRICES)
    for step in (1, 2):
        simulation.step(dataclasses.replace(batch_of([(5, [30])]), step=step))
    trace = simulation.close()
    rows = [row for row in trace.holdings if row.device == "h100-0"]
    # The device is held from the node's arrival on, without a gap, and once.
    assert sum(row.device_s for row in rows) == pytest.approx(trace.steps[-1].end_s - 5.0)
    assert PRICES.cost_usd(rows) == pytest.approx((trace.steps[-1].end_s - 5.0) * 3.6 / 3600)
    assert any(row.state is ReplicaState.SLEEPING for row in simulation.ledger.holdings)
