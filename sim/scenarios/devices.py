"""The devices of a scenario by node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhfless.scaling.placement import Device
from rlhfless.sim.scenarios.cluster import MachinesSpec


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
