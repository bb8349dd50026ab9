"""The devices of a scenario by node, and those that are set aside for a learner that may move to other kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhfless.scaling.placement import Device
from rlhfless.sim.scenarios.cluster import MachinesSpec
from rlhfless.sim.scenarios.scenario import Scenario
from rlhfless.sim.scenarios.timing import DoesNotFit, learner_devices_needed
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import nearest


@dataclass(frozen=True, slots=True)
class DevicesByNode:
    """Part of the cluster's devices, by node, in the order in which they are taken."""

    devices: tuple[tuple[str, tuple[Device, ...]], ...]
    """Node, and its devices."""

    @classmethod
    def of(cls, machines: MachinesSpec, devices: int) -> DevicesByNode:
        """The first `devices` devices of these machines."""
        nodes = []
        for node in range(machines.nodes):
            first = node * machines.devices_per_node
            count = min(machines.devices_per_node, devices - first)
            if count > 0:
                name, kind = f"{machines.kind}-node-{node}", machines.kind
                nodes.append((name, tuple(Device(f"{kind}-{first + i}", kind, i, name) for i in range(count))))
        return cls(tuple(nodes))

    @property
    def all(self) -> list[Device]:
        return [device for _, devices in self.devices for device in devices]

    def without(self, taken: Sequence[Device]) -> DevicesByNode:
        """All devices but these."""
        names = {device.name for device in taken}
        return DevicesByNode(
            tuple((node, tuple(s for s in devices if s.name not in names)) for node, devices in self.devices)
        )

    def actors(self, devices_each: int) -> Iterator[tuple[str, tuple[Device, ...]]]:
        """Node and devices of each actor; none spans two nodes."""
        for node, devices in self.devices:
            for first in range(0, len(devices) - devices_each + 1, devices_each):
                yield node, devices[first : first + devices_each]


def elsewhere(scenario: Scenario, placement: ScenarioPlacementSpec) -> dict[str, tuple[Device, ...]]:
    """By kind, the devices that `placement.learner_elsewhere` sets aside: the last ones of the kind.

    Raises InputError if they are not there, or the weights do not get away from them; DoesNotFit if they do not hold
    the learner's state.
    """
    asked, machines = placement.learner_elsewhere, {each.kind: each for each in scenario.cluster.machines}
    if asked and scenario.transport.kind == "nccl":
        what = f"nccl goes between the devices that a run begins with, but placement.learner_elsewhere is {asked}"
        hint = "take `auto`, or leave learner_elsewhere out"
        raise InputError(scenario.name, [Problem("transport.kind", what, hint)])
    for kind, count in asked.items():
        _require(scenario, kind, count, machines)
    return {
        kind: tuple(DevicesByNode.of(machines[kind], machines[kind].devices).all[-count:])
        for kind, count in asked.items()
    }


def _require(scenario: Scenario, kind: str, count: int, machines: Mapping[str, MachinesSpec]) -> None:
    """Raises as `elsewhere` does."""
    where, own = f"placement.learner_elsewhere.{kind}", scenario.cluster.machines[0].kind
    if kind == own:
        what = f"{count} x {kind}, which is the learner's own kind"
        hint = "leave it out, and let the number of its devices change with learner.min_devices"
        raise InputError(scenario.name, [Problem(where, what, hint)])
    if kind not in machines:
        what = f"{count} x {kind}, but cluster.machines has {', '.join(machines)}"
        hint = f"{nearest(kind, machines)}Add the kind to cluster.machines, or leave it out"
        raise InputError(scenario.name, [Problem(where, what, hint)])
    if count > machines[kind].devices:
        what = f"{count} x {kind}, but cluster.machines has {machines[kind].devices} of them"
        raise InputError(scenario.name, [Problem(where, what, "take fewer, or add machines of the kind")])
    needed = learner_devices_needed(scenario, kind)
    if count < needed:
        what = f"the learner has {count} x {kind} there, and its state needs {needed}"
        hint = "give it more devices of the kind, or lower learner.state_bytes_per_parameter"
        raise DoesNotFit(scenario.name, [Problem(where, what, hint)])
