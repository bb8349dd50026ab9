"""Run one policy through one run of a scenario."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from pydantic import ValidationError

from rlhfless.records.traces import Trace
from rlhfless.scaling.policies.contract import RunContract
from rlhfless.scaling.policies.cost_aware import CostAware
from rlhfless.scaling.policies.cost_aware.forecasts import Forecaster, RemainingLengths
from rlhfless.scaling.policy import Ints, Policy, StepView
from rlhfless.sim.experiment.contracts import contract_of, span_of
from rlhfless.sim.experiment.figures import DeviceSupply, StepFigures, step_figures
from rlhfless.sim.policies import POLICIES, PolicyError, PolicyKind, configured, policy_kind
from rlhfless.sim.run import simulate
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.scenarios.build import ScenarioLayout, price_book, setup
from rlhfless.sim.scenarios.draw import batches
from rlhfless.sim.scenarios.scenario import BEST_STATIC, CLAIRVOYANT, PolicyEntry, Scenario
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec
from rlhfless.spec import ContractSpec, CostAwareSpec
from rlhfless.spec.base import SpecModel
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import explain, nearest


@dataclass(frozen=True, slots=True)
class FleetShape:
    """The size and placement of a fleet."""

    placement: ScenarioPlacementSpec
    devices: int | None = None
    """Devices of the kind that generates; None: all of them."""

    def __str__(self) -> str:
        size = "all devices" if self.devices is None else f"{self.devices} devices"
        if self.placement.mode == "colocated":
            return f"{size}, co-located"
        size += f", {self.placement.learner_devices or 'half'} of them the learner's"
        return size


@dataclass(frozen=True, slots=True)
class ExperimentTask:
    """The inputs of one run, which any process can simulate."""

    scenario: Scenario
    entry: PolicyEntry
    fleet: FleetShape
    contracts: tuple[ContractSpec, ...]
    seed: int
    traced: bool = False
    """Whether the result keeps the whole trace, for pictures."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run."""

    label: str
    fleet: FleetShape
    seed: int
    steps: tuple[StepFigures, ...]
    infeasible: Mapping[int, str] = field(default_factory=dict)
    """By step, the reason of a plan that could not keep the contract by its forecast."""
    unused: Mapping[str, int] = field(default_factory=dict)
    """By kind, the number of devices that are paid for by the machine and never held."""
    trace: Trace | None = None
    batches: tuple[RolloutBatch, ...] = ()
    """The batches of the trace."""

    @property
    def time_s(self) -> float:
        return sum(step.time_s for step in self.steps)

    @property
    def usd(self) -> float:
        return sum(step.usd for step in self.steps)


def kind_of(scenario: Scenario, entry: PolicyEntry) -> PolicyKind:
    """Return the policy of an entry, from the registry or the user's own; for a bound, the policy that it bounds.

    Raises InputError for an unknown name.
    """
    name = _policy_of(entry)
    if name not in POLICIES and ":" not in name:
        known = [*POLICIES, CLAIRVOYANT, BEST_STATIC]
        what, hint = f"{name!r} is no policy", f"{nearest(name, known)}There are {', '.join(known)}"
        raise InputError(scenario.name, [Problem("policies", what, hint)])
    try:
        return policy_kind(name)
    except PolicyError as error:
        raise InputError(scenario.name, [Problem("policies", error.what, error.hint)]) from error


def _policy_of(entry: PolicyEntry) -> str:
    return "cost_aware" if entry.name == CLAIRVOYANT else entry.name


def fleet_of(scenario: Scenario, entry: PolicyEntry) -> FleetShape:
    """Return the entry's own placement, else the placement for which the policy is made, else the scenario's.

    Raises InputError for an overlapping schedule on a co-located placement.
    """
    kind, placement = kind_of(scenario, entry), entry.placement
    if placement is None:
        mode = kind.placement or scenario.placement.mode
        placement = scenario.placement.model_copy(update={"mode": mode})
    if scenario.steps_ahead and placement.mode == "colocated":
        overlaps = f"schedule {scenario.schedule.type} overlaps generation and learning"
        what = f"{entry.shown} is placed co-located, and {overlaps}"
        hint = "leave it out, or give it a `placement` of mode `disaggregated` or the scenario the schedule `sync`"
        raise InputError(scenario.name, [Problem("policies", what, hint)])
    return FleetShape(placement)


def settings_of(scenario: Scenario, entry: PolicyEntry) -> SpecModel:
    """Return the policy's own settings. Raises InputError for an unknown policy, or a setting that it does not have."""
    kind = kind_of(scenario, entry)
    try:
        return configured(_policy_of(entry), entry.settings)
    except ValidationError as error:
        raise InputError(
            f"{scenario.name}, settings of policy {entry.shown}", explain(error, kind.settings, {})
        ) from error


def layout_of(scenario: Scenario, fleet: FleetShape) -> ScenarioLayout:
    """Return the slots of a fleet. Raises InputError if the learner or an actor does not fit."""
    return ScenarioLayout(scenario, fleet.placement, fleet.devices)


def supply_of(scenario: Scenario, layout: ScenarioLayout, *, reserved: bool) -> DeviceSupply:
    """Return the devices that a policy may hold, and the spare ones. `reserved`: it pays for all that it may hold."""
    count = {machines.kind: machines.devices for machines in layout.machines}
    count[layout.machines[-1].kind] = layout.devices
    prices, spare = price_book(scenario), {}
    for machines in scenario.cluster.machines:
        used, each = count.get(machines.kind, 0), machines.devices_per_node
        if machines.tenure == "owned":
            spare[machines.kind] = machines.devices - used
        elif prices.device(machines.kind).rented_by == "node":
            spare[machines.kind] = -(-used // each) * each - used
    return DeviceSupply(count, reserved, spare)


def run(task: ExperimentTask, on_step: Callable[[], None] = lambda: None) -> RunResult:
    """Simulate the run of a task, calling `on_step` after each step.

    Raises InputError for a scenario that does not fit, SimulationError for a fault of the policy.
    """
    scenario, entry = task.scenario, task.entry
    kind = kind_of(scenario, entry)
    layout = layout_of(scenario, task.fleet)
    prices = price_book(scenario)
    drawn = batches(scenario, task.seed)
    settings = settings_of(scenario, entry)
    by_step = task.contracts if len(task.contracts) > 1 else ()
    span = span_of(contract_of(scenario, entry), scenario)
    terms = RunContract(task.contracts[0], scenario.steps, by_step, span if span > 1 else scenario.steps)
    lengths = KnownLengths()
    if isinstance(settings, CostAwareSpec) and entry.name == CLAIRVOYANT:
        policy: Policy = CostAware(settings, terms, Clairvoyant(lengths.of))
    else:
        policy = kind.make(settings, terms)
    parts = setup(scenario, layout, task.seed, reserved=kind.reserved)
    trace = simulate(parts, policy, prices, drawn, on_step=lambda _: on_step(), on_rollout=lengths.add)
    supply = supply_of(scenario, layout, reserved=kind.reserved)
    figures = step_figures(trace, prices, supply)
    kept = (trace, tuple(drawn)) if task.traced else (None, ())
    plans = [decision for decision in trace.decisions if decision.kind == "plan"]
    infeasible = {each.step: str(each.inputs["reason"]) for each in plans if each.inputs.get("feasible") is False}
    unused = _never_held(trace, supply)
    return RunResult(entry.shown, task.fleet, task.seed, tuple(figures), infeasible, unused, *kept)


def _never_held(trace: Trace, supply: DeviceSupply) -> dict[str, int]:
    """Return the devices by kind that cost money whether they are held or not, and that no function ever held."""
    held = Counter(kind for kind, _ in {(holding.device_kind, holding.device) for holding in trace.holdings})
    paid = {kind: count for kind, count in supply.count.items() if supply.reserved or kind in supply.spare}
    unused = {kind: count - held[kind] + supply.spare.get(kind, 0) for kind, count in paid.items()}
    return {kind: count for kind, count in unused.items() if count > 0}


class Clairvoyant(Forecaster):
    """A forecaster that knows each length.

    `lengths` takes a step's number, and returns the tokens of its samples [samples].
    """

    def __init__(self, lengths: Callable[[int], Ints]) -> None:
        self._lengths = lengths

    def look(self, view: StepView) -> RemainingLengths:
        samples = np.flatnonzero(~view.finished)
        left = self._lengths(view.step)[samples] - view.tokens[samples]
        return RemainingLengths(samples, np.array([0.5]), np.arange(samples.size), np.maximum(left, 1.0)[:, None])


class KnownLengths:
    """The lengths of the samples that the steps of a run generate."""

    def __init__(self) -> None:
        self._of_step: dict[int, Ints] = {}

    def add(self, batch: RolloutBatch) -> None:
        """Add the samples of a rollout that starts."""
        self._of_step[batch.step] = batch.response_tokens

    def of(self, step: int) -> Ints:
        """Return the tokens of a step's samples, `[samples]`."""
        return self._of_step[step]
