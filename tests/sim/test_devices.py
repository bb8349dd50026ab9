"""Devices taken in turns, worked by hand: which replica waits for which, what sleep costs, and waits without end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from fakes.simple_policies import Evenly, InTurns, Scripted
from fakes.small_fleet import (
    LEARNER,
    MEMORY,
    PRICES,
    REFERENCE,
    SCORING,
    actor,
    batch_of,
    called,
    on,
    one_step,
    setup_of,
    slot_setup,
)
from rlhfless.records import ReplicaState, Work
from rlhfless.scaling.accounting import summarise
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.scaling.policy import (
    Action,
    Beat,
    Event,
    Generated,
    Release,
    StepView,
)
from rlhfless.sim.fleet import SimulationError
from rlhfless.sim.simulation import Simulation


def test_a_freed_actor_s_device_serves_while_the_tail_is_drawn() -> None:
    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        free = isinstance(event, Beat) and view.slots[0].state is ReplicaState.SERVING
        return (Release(0),) if free and not len(view.samples_at(0)) else ()

    setup = setup_of(actor(0), actor(1), services=(REFERENCE,))
    simulation, generation = one_step(setup, Scripted(answer), batch_of([(5, [3]), (5, [200]), (5, [4])]))
    released_s = next(hold.end_s for hold in simulation.ledger.holdings if hold.state is ReplicaState.SERVING)
    first, last = called(simulation, Work.LOGPROBS)
    assert generation.progress.table.finish_s[2] < released_s < generation.end_s
    # It starts on demand, in the order in which groups became complete.
    assert (first.start_s, first.end_s) == pytest.approx((released_s + 0.7, released_s + 0.7 + 2 * 0.01))
    assert last.start_s == pytest.approx(generation.end_s)


def test_services_wait_for_devices_and_an_endless_wait_is_a_fault() -> None:
    batch = batch_of([(5, [3]), (5, [100])])
    simulation, generation = one_step(setup_of(actor(0), services=(REFERENCE,)), InTurns(), batch)
    assert called(simulation, Work.LOGPROBS)[0].start_s == pytest.approx(generation.end_s + 0.7)
    message = r"slot 1 \(reference\) waits for device 'h100-0', which slot 0 \(generation\) holds"
    with pytest.raises(SimulationError, match=message):
        one_step(setup_of(actor(0), services=(REFERENCE,)), Evenly(), batch)
    simulation = Simulation(setup_of(actor(0), learner=on(LEARNER, slot_setup(0))), Scripted(lambda *_: ()), PRICES)
    with pytest.raises(SimulationError, match=r"slot 2 \(learner\) waits for device 'h100-0', which slot 0"):
        simulation.step(batch)


def test_generation_that_waits_for_a_device_for_ever_is_a_fault() -> None:
    def answer(at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        return (Release(0),) if isinstance(event, Generated) else ()

    simulation, _ = one_step(
        setup_of(actor(0), learner=on(LEARNER, slot_setup(0))), Scripted(answer), batch_of([(5, [3])])
    )
    with pytest.raises(SimulationError, match=r"slot 0 \(generation\) waits .* which slot 2 \(learner\) holds"):
        simulation.step(batch_of([(5, [3])]))


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


def test_a_sleeping_replica_pays_for_a_device_only_if_no_other_replica_does() -> None:
    """The actor sleeps while the learner is awake on its device, and the other way round."""
    setup = setup_of(actor(0), learner=on(LEARNER, slot_setup(0, start_s=1.0)))
    batches = [dataclasses.replace(batch_of([(5, [30])]), step=step) for step in (1, 2)]
    bills = {}
    for book in (PRICES, MEMORY):
        simulation = Simulation(setup, InTurns("host"), book)
        for batch in batches:
            simulation.step(batch)
        trace = simulation.close()
        bills[book] = [row for row in trace.holdings if row.device == "h100-0"], trace.steps
    rows, steps = bills[PRICES]
    # The device is held from the node's arrival on, without a gap, and once.
    assert sum(row.device_s for row in rows) == pytest.approx(steps[-1].end_s - 5.0)
    assert PRICES.cost_usd(rows) == pytest.approx((steps[-1].end_s - 5.0) * 3.6 / 3600)
    rows, steps = bills[MEMORY]
    asleep_s = sum(row.device_s for row in rows if row.state is ReplicaState.SLEEPING)
    awake_s = sum(row.device_s for row in rows if row.state is not ReplicaState.SLEEPING)
    assert MEMORY.cost_usd(rows) == pytest.approx((awake_s * 3.6 + asleep_s * 0.36) / 3600)
    held = {row.name: row.provisioned_device_s for row in summarise(trace, MEMORY).functions}
    assert held["generation"] + held["learner"] == pytest.approx(awake_s)  # host memory is no device


def test_waking_takes_its_tier_s_time() -> None:
    ends = {}
    for tier in ("host", "disk", None):
        simulation = Simulation(setup_of(actor(0)), InTurns(tier), PRICES)
        for step in (1, 2):
            simulation.step(dataclasses.replace(batch_of([(5, [30])]), step=step))
        ends[tier] = simulation.ledger.steps[1].end_s - simulation.ledger.steps[0].end_s
    # Actor and learner wait for each other: generation 2.0 or its tier, then scoring, then the learner 1.0 or its tier.
    assert ends["disk"] - ends["host"] == pytest.approx(3 * (1.5 - 0.5))
    assert ends[None] - ends["host"] == pytest.approx(2.0 - 0.5 + 0.0 - 0.5 + 1.0 - 0.5)
