"""The machines of a scenario, their prices, and the transport of weights and KV between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhfless.scaling.fleet_constants import (
    BROADCAST_BYTES_PER_S,
    LOAD_BYTES_PER_S,
    LOAD_FIXED_S,
    PUBLISH_BYTES_PER_S,
    PULL_BYTES_PER_S,
    SimulatedTransport,
)
from rlhfless.scaling.latency.devices import DeviceSheet, load_devices
from rlhfless.scaling.placement import Device
from rlhfless.spec.base import MOST_PROCESSES, SpecModel
from rlhfless.spec.explain import nearest

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class MachinesSpec(SpecModel):
    """Machines of one kind."""

    kind: str
    """Device kind, as the price book and the device table name it."""

    nodes: Count = 1
    """Number of machines. Left out of a cluster of `serverless` containers, there are as many as the run can use: an
    actor for each prompt of a step, and the learner."""

    devices_per_node: Count
    """Devices of each machine."""

    tenure: Literal["rented", "spot", "owned"] = "rented"
    """`rented`: on demand. `spot`: at the spot price, and taken away at times. `owned`: paid for, used or not."""

    released_value: Annotated[float, Field(ge=0, le=1)] | None = None
    """For owned devices: share of the price that a released device earns, because other users pay for it."""

    rented_by: Literal["node", "device"] | None = None
    """Whether whole nodes are rented, which are paid for as long as the run lasts, or single devices; by the price book
    when left out. Not for owned devices."""

    stragglers: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the devices that are slow, rounded down to whole devices: the last ones."""

    straggler_slowdown: Annotated[float, Field(ge=1)] = 1.3
    """How much longer an iteration takes on a slow device: a factor."""

    @model_validator(mode="after")
    def _fits(self) -> MachinesSpec:
        if self.devices > MOST_PROCESSES:  # a simulation takes time and memory for each device
            raise ValueError(
                f"nodes ({self.nodes:,}) x devices_per_node ({self.devices_per_node:,}) is more than "
                f"{MOST_PROCESSES:,} devices; use fewer machines"
            )
        if (self.tenure == "owned") != (self.released_value is not None):
            raise ValueError(
                f"tenure is {self.tenure!r} and released_value {self.released_value}; owned machines need a "
                "released_value from 0 (idle ones are worth nothing) to 1, and others have none"
            )
        if self.tenure == "owned" and self.rented_by is not None:
            raise ValueError(f"rented_by is {self.rented_by!r}, and the machines are owned; leave it out")
        return self

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node


class BillingTermsSpec(SpecModel):
    """The seller's terms."""

    granularity_s: NotNegative = 0.0
    """Time is rounded up to a multiple of this; 0 bills the time used."""

    minimum_s: NotNegative = 0.0
    """Shortest time that is billed."""


class ServerlessSpec(SpecModel):
    """Containers that are rented by the second: a replica that is released is not paid for, and comes back from a
    snapshot. The learner holds its devices only for its work of a step. Figures with sources are in
    docs/simulate.md."""

    premium: Positive = 1.0
    """The seller's price by that of the price book. In 2026 sellers by the second took 1.26 to 1.80."""

    restore_s: NotNegative = 14.0
    """Seconds until a replica is up, in place of a cold start; they are paid for. An engine of vLLM from a snapshot of
    its memory took 13.8 s in the mean, a container 35 to 45 s."""

    state_bytes_per_s: Positive = 1e9
    """Rate at which each device of the learner reads its state from a store before its work of a step, and writes it
    back: an assumption. It is paid for, and with the learner's restore it is done during generation; a step waits for
    it where its generation is shorter."""


class ClusterSpec(SpecModel):
    """All machines that a policy may use, and how they are billed."""

    machines: Annotated[tuple[MachinesSpec, ...], Field(min_length=1)]
    """One kind; or two, of which the learner has the first and generation the second, with placement
    `disaggregated`."""

    prices: str | None = None
    """Price book (YAML); the bundled one when left out."""

    devices: str | None = None
    """Your own devices (YAML, in the form of rlhfless/scaling/devices.yaml), in addition to the bundled table; with a
    `price` there a kind needs none in the price book."""

    provisioning_s: NotNegative = 0.0
    """Seconds to provision a machine that has not been used yet. 0: all machines run from the start."""

    billing: BillingTermsSpec | None = None
    """How the time of rented devices is billed; by the price book when left out."""

    reacquire_s: NotNegative = 0.0
    """Seconds to get a device back that was given back, each time it is no longer paid for. 0: at once, as if nobody
    else were waiting. What slept on it is gone, so a cold start follows. Policies whose users keep the whole cluster
    never give one back."""

    serverless: ServerlessSpec | None = None
    """Devices are those of a seller of containers. Functions then share none: with placement `disaggregated`."""

    def sheet(self, kind: str) -> DeviceSheet:
        """Return the data sheet of a kind of device."""
        return load_devices(self.devices)[kind]

    @model_validator(mode="after")
    def _kinds_are_known(self) -> ClusterSpec:
        known = load_devices(self.devices)
        for machines in self.machines:
            if machines.kind not in known:
                raise ValueError(
                    f"kind is {machines.kind!r}, of which nothing is known; {nearest(machines.kind, known)}The device "
                    f"table has {', '.join(known)}; `devices` can name a file with others"
                )
        return self

    @model_validator(mode="after")
    def _containers_are_rented_alone(self) -> ClusterSpec:
        if self.serverless is None:
            return self
        others = {"billing": self.billing, "reacquire_s": self.reacquire_s, "provisioning_s": self.provisioning_s}
        given = [name for name, value in others.items() if value]
        given += [f"machines.{each.kind}" for each in self.machines if each.tenure != "rented" or each.rented_by]
        if given:
            raise ValueError(
                f"serverless containers are rented by the second, each by itself, and {given[0]} says otherwise; leave "
                "one of the two out"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _generation_has_one_kind(cls, data: Any) -> Any:
        machines = data.get("machines") if isinstance(data, dict) else None
        if isinstance(machines, list | tuple) and len(machines) > 2:
            raise ValueError(
                f"machines has {len(machines)} entries, and generation on several kinds of devices was removed; give "
                "one kind, or two: the learner's and that of generation"
            )
        return data

    @model_validator(mode="after")
    def _kinds_differ(self) -> ClusterSpec:
        kinds = [machines.kind for machines in self.machines]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            raise ValueError(f"kind {twice[0]!r} has two entries; merge them")
        return self


def uncounted_nodes(devices_per_node: int, prompts: int, actor_devices: int, learner_devices: int | None) -> int:
    """Return the number of machines that a run can use.

    They hold an actor for each prompt of a step, and the learner, which takes one machine by default.
    """
    return -(-(prompts * actor_devices + (learner_devices or devices_per_node)) // devices_per_node)


class TransportSpec(SpecModel):
    """How weights reach the actors at the beginning of a step. Defaults are the priors of
    rlhfless/scaling/fleet_constants.py, which has their sources."""

    kind: SimulatedTransport = "auto"
    """As `weights.transport` of a run. `auto`: the learner writes a file to its node's memory, which each other node
    pulls once. `nccl`: it writes that file, too, and broadcasts it to actors that are never released and share no GPU
    with it."""

    publish_bytes_per_s: Positive = PUBLISH_BYTES_PER_S.value
    """Rate at which the learner's first rank writes a version."""

    pull_bytes_per_s: Positive = PULL_BYTES_PER_S.value
    """Rate at which the learner's node gives a version to all other nodes together."""

    load_bytes_per_s: Positive = LOAD_BYTES_PER_S.value
    """Rate at which the engine of one device takes in a version. Models with experts take several times as long
    (docs/simulate.md)."""

    broadcast_bytes_per_s: Positive = BROADCAST_BYTES_PER_S.value
    """Rate at which one device receives its part of a broadcast."""

    fixed_s: NotNegative = LOAD_FIXED_S.value
    """Seconds of each publication and each load, whatever its size."""

    @property
    def device_bytes_per_s(self) -> float:
        """Rate at which a device of an actor gets new weights; broadcast and load overlap, and the slower counts."""
        return min(self.broadcast_bytes_per_s, self.load_bytes_per_s) if self.kind == "nccl" else self.load_bytes_per_s


class DeclaredTimes(SpecModel):
    """Starts, sleep and transport by the priors of rlhfless/scaling/fleet_constants.py, and by `transport`."""

    type: Literal["declared"] = "declared"


class MeasuredTimes(SpecModel):
    """Starts, sleep and transport as a run or a self-test measured them; what neither did is by the priors."""

    type: Literal["measured"] = "measured"

    path: str
    """A file that `rlhfless simulate --calibrate` wrote."""


FleetTimesSpec = Annotated[DeclaredTimes | MeasuredTimes, Field(discriminator="type")]


@dataclass(frozen=True, slots=True)
class DevicesByNode:
    """Part of the cluster's devices, by node, in the order in which they are taken."""

    devices: tuple[tuple[str, tuple[Device, ...]], ...]
    """Node, and its devices."""

    @classmethod
    def of(cls, machines: MachinesSpec, devices: int) -> DevicesByNode:
        """Return the first `devices` devices of these machines."""
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
        """Return all devices but these."""
        names = {device.name for device in taken}
        return DevicesByNode(
            tuple((node, tuple(s for s in devices if s.name not in names)) for node, devices in self.devices)
        )

    def actors(self, devices_each: int) -> Iterator[tuple[str, tuple[Device, ...]]]:
        """Yield node and devices of each actor; none spans two nodes."""
        for node, devices in self.devices:
            for first in range(0, len(devices) - devices_each + 1, devices_each):
                yield node, devices[first : first + devices_each]
