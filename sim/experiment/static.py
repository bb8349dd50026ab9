"""Static fleets that are chosen in hindsight: several are tried, and the contract's best one is kept.

`best_static` is the best of every size and both placements; a named static policy has its own placement and all
devices.
"""

from __future__ import annotations

from rlhfless.sim.experiment.run import FleetShape, fleet_of
from rlhfless.sim.scenarios import timing
from rlhfless.sim.scenarios.scenario import BEST_STATIC, PolicyEntry, Scenario
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec


def tried(scenario: Scenario, entry: PolicyEntry) -> list[FleetShape]:
    """The fleets of which an entry is the best: one for a policy that chooses its devices itself."""
    if entry.name == BEST_STATIC:
        return fleets(scenario)
    return [fleet_of(scenario, entry)]


def fleets(scenario: Scenario) -> list[FleetShape]:
    """Every fleet that the model fits on: co-located on the devices of 1, 2, 3, ... actors; and disaggregated, with
    every number of actors and a learner of 1, 2, 4, ... times the devices it needs, or of all devices of its kind."""
    machines, each = scenario.cluster.machines[-1], scenario.engine.devices
    if machines is not scenario.cluster.machines[0]:
        placement = ScenarioPlacementSpec(mode="disaggregated")
        return [FleetShape(placement, size) for size in range(each, machines.devices + 1, each)]
    needed = timing.learner_devices_needed(scenario, machines.kind)
    shapes: list[FleetShape] = []
    if not scenario.steps_ahead:
        sizes = range(each, machines.devices + 1, each)
        shapes += [FleetShape(ScenarioPlacementSpec(mode="colocated"), size) for size in sizes if size >= needed]
    learner = needed
    while learner <= machines.devices - each:
        placement = ScenarioPlacementSpec(mode="disaggregated", learner_devices=learner)
        shapes += [FleetShape(placement, learner + size) for size in range(each, machines.devices - learner + 1, each)]
        learner *= 2
    return shapes
