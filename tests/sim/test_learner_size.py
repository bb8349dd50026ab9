"""A learner whose number of devices changes between two steps."""

from __future__ import annotations

import dataclasses

import pytest

from fakes.places import SCENARIOS
from fakes.simple_policies import Evenly
from fakes.small_fleet import LEARNER, PRICES, actor, batch_of, called, on, setup_of, slot_setup
from rlhfless.records import Work
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.scaling.plan import RunContract
from rlhfless.scaling.prices import PriceBook
from rlhfless.sim.experiment.run import FleetShape, layout_of
from rlhfless.sim.learner_size import SimulatedLearnerSize
from rlhfless.sim.scenarios.load import load_scenario
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec
from rlhfless.sim.setup import LearnerShape
from rlhfless.sim.simulation import Simulation
from rlhfless.spec import WeightedSpec
from rlhfless.spec.errors import InputError

STEPS, START_S = 5, 0.1


def shape(devices: int) -> LearnerShape:
    """0.2 s of each step, and a millisecond a token of two devices; the first has number 9."""
    allocation = Allocation.of([Device(f"h100-{9 - i}", "h100", 9 - i) for i in range(devices)])
    where = dataclasses.replace(slot_setup(9, start_s=START_S, node=0), allocation=allocation)
    return dataclasses.replace(on(LEARNER, where), learn_token_s=0.002 / devices)


def simulated(time_weight: float, prices: PriceBook = PRICES, off: int = 0) -> Simulation:
    setup = setup_of(actor(0), learner=shape(2), max_staleness=off)
    terms = RunContract(WeightedSpec(time_weight=time_weight), STEPS)
    size = SimulatedLearnerSize({1: shape(1), 2: shape(2)}, setup, terms, prices)
    simulation = Simulation(setup, Evenly(), prices, size)
    for step in range(1, STEPS + 1):
        simulation.step(dataclasses.replace(batch_of([(5, [100])]), step=step))
    simulation.close()
    return simulation


def changes(simulation: Simulation) -> list[tuple[int, str, object]]:
    found = [each for each in simulation.ledger.decisions if each.kind == "learner_ranks"]
    return [(each.step, each.choice, each.inputs["before"]) for each in found]


def test_cost_takes_a_device_back_after_the_first_step_that_was_measured() -> None:
    simulation = simulated(time_weight=0)
    assert changes(simulation) == [(2, "1 x h100", "2 x h100")]
    learned_s = [call.end_s - call.start_s for call in called(simulation, Work.LEARN)]
    assert learned_s == pytest.approx([0.2 + 0.105] * 2 + [0.2 + 0.21] * 3)
    steps = simulation.ledger.steps
    assert steps[1].start_s == steps[0].end_s
    assert steps[2].start_s == pytest.approx(steps[1].end_s + START_S), "the weights are those of the new group"
    held_until_s = {}
    for holding in simulation.ledger.holdings:
        held_until_s[holding.device] = max(holding.end_s, held_until_s.get(holding.device, 0.0))
    assert held_until_s["h100-8"] == pytest.approx(steps[1].end_s)
    assert held_until_s["h100-9"] >= steps[4].end_s


def test_time_keeps_all() -> None:
    assert changes(simulated(time_weight=1)) == []


def test_nothing_is_saved_where_a_device_costs_as_much_after_its_release() -> None:
    whole_nodes = [device.model_copy(update={"rented_by": "node"}) for device in PRICES.devices]
    assert changes(simulated(0, PriceBook(devices=tuple(whole_nodes)))) == []


def test_the_next_step_is_drawn_during_a_change_where_steps_overlap() -> None:
    simulation = simulated(time_weight=0, off=1)
    assert changes(simulation) == [(2, "1 x h100", "2 x h100")]
    assert len(simulation.ledger.steps) == STEPS
    assert sum(call.end_s - call.start_s for call in called(simulation, Work.LEARN)[2:]) == pytest.approx(3 * 0.41)


def test_a_scenario_says_how_few() -> None:
    scenario = load_scenario(SCENARIOS / "gsm8k-3b-h100.yaml")
    elastic = scenario.model_copy(
        update={"learner": scenario.learner.model_copy(update={"min_devices": 2}), "reference": None}
    )
    apart = FleetShape(ScenarioPlacementSpec(mode="disaggregated", learner_devices=4))
    assert layout_of(scenario, apart).learner_sizes() == {}
    sizes = layout_of(elastic, apart).learner_sizes()
    assert {count: len(of.slot_setup.allocation.devices) for count, of in sizes.items()} == {2: 2, 3: 3, 4: 4}
    assert sizes[2].learn_token_s == pytest.approx(2 * sizes[4].learn_token_s)
    first = layout_of(elastic, apart).learner().slot_setup
    assert sizes[4].slot_setup.start_s == first.start_s + first.sleep_s + first.wake_s
    with pytest.raises(InputError, match="the learner shares its devices"):
        layout_of(elastic, FleetShape(ScenarioPlacementSpec(mode="colocated"))).learner_sizes()
