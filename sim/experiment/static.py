"""Static fleets that are chosen in hindsight: several are tried, and the contract's best one is kept.

`best_static` is the best of every size, both placements and every choice of kinds of devices; a named static policy has
its own placement and all devices, and may leave out kinds that do it no good.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from rlhfless.sim.experiment.run import FleetShape, fleet_of, kind_of
from rlhfless.sim.scenarios import timing
from rlhfless.sim.scenarios.scenario import BEST_STATIC, PolicyEntry, Scenario
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec


def tried(scenario: Scenario, entry: PolicyEntry) -> list[FleetShape]:
    """The fleets of which an entry is the best: one for a policy that chooses its devices itself."""
    if entry.name == BEST_STATIC:
        return [replace(fleet, kinds=kinds) for fleet in fleets(scenario) for kinds in _kinds(scenario)]
    fleet = fleet_of(scenario, entry)
    kinds = _kinds(scenario) if kind_of(scenario, entry).reserved else [None]
    return [replace(fleet, kinds=chosen) for chosen in kinds]


def _kinds(scenario: Scenario) -> list[tuple[str, ...] | None]:
    """Every choice of kinds of devices with the first one, on which the learner is; None is all of them."""
    first, *others = (machines.kind for machines in scenario.cluster.machines)
    fewer = (chosen for count in range(len(others)) for chosen in combinations(others, count))
    return [None, *((first, *chosen) for chosen in fewer)]


def fleets(scenario: Scenario) -> list[FleetShape]:
    """Every fleet of the scenario's first kind that the model fits on, with all devices of the other kinds: co-located
    on the devices of 1, 2, 3, ... actors; and disaggregated, with every number of actors and a learner of 1, 2, 4, ...
    times the devices it needs."""
    machines, each = scenario.cluster.machines[0], scenario.engine.devices
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
