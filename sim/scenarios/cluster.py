"""Machines of a scenario, their prices, and how weights and KV are transported between them."""

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
    """Device kind, as named in the price book and the device table."""

    nodes: Count = 1
    """Number of machines. If omitted with `serverless`, all that the run can use: one actor for each prompt of a step,
    plus the learner."""

    devices_per_node: Count
    """Devices per machine."""

    tenure: Literal["rented", "spot", "owned"] = "rented"
    """`rented`: on demand. `spot`: at the spot price, with occasional interruptions. `owned`: paid for, used or not."""

    released_value: Annotated[float, Field(ge=0, le=1)] | None = None
    """For owned devices: fraction of the price that a released device earns from other users, from 0 to 1. Required for
    `owned`; not allowed otherwise."""

    rented_by: Literal["node", "device"] | None = None
    """Rental unit. `node`: whole nodes, paid for as long as the run lasts. `device`: single devices. Not allowed for
    owned devices. `null`: from the price book."""

    stragglers: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of slow devices, rounded down to whole devices. The last devices are the slow ones."""

    straggler_slowdown: Annotated[float, Field(ge=1)] = 1.3
    """Factor by which an iteration takes longer on a slow device."""

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
    """Billing terms of the provider."""

    granularity_s: NotNegative = 0.0
    """Billing increment in seconds; time is rounded up to a multiple of it. 0: bill the exact time."""

    minimum_s: NotNegative = 0.0
    """Minimum billed time, in seconds."""


class ServerlessSpec(SpecModel):
    """Serverless containers, rented by the second. A released replica costs nothing and is restored from a snapshot.
    The learner holds its devices only while it works on a step. See docs/simulate.md for figures and sources."""

    premium: Positive = 1.0
    """Ratio of the provider's price to that of the price book. In 2026, providers that bill by the second charged 1.26
    to 1.80 times as much."""

    restore_s: NotNegative = 14.0
    """Seconds to restore a replica, instead of a cold start. This time is billed. Restoring a vLLM engine from a memory
    snapshot took 13.8 s on average; restoring a container took 35 to 45 s."""

    state_bytes_per_s: Positive = 1e9
    """Rate at which each learner device reads its state from storage before it works on a step, and writes it back, in
    bytes per second; an assumption. This time is billed. It overlaps with generation, as does the learner's restore; a
    step waits for it only if its generation is shorter."""


class ClusterSpec(SpecModel):
    """All machines that a policy may use, and how they are billed."""

    machines: Annotated[tuple[MachinesSpec, ...], Field(min_length=1)]
    """Either one kind, or two kinds with placement `disaggregated`: the first for the learner, the second for
    generation."""

    prices: str | None = None
    """Price book (YAML). `null`: the bundled one."""

    devices: str | None = None
    """Your own devices (YAML, in the format of rlhfless/scaling/devices.yaml), in addition to the bundled table. A kind
    with a `price` there needs none in the price book. `null`: only the bundled table."""

    provisioning_s: NotNegative = 0.0
    """Seconds to provision a machine that has not been used yet. 0: all machines run from the start."""

    billing: BillingTermsSpec | None = None
    """Billing terms of rented devices. `null`: from the price book."""

    reacquire_s: NotNegative = 0.0
    """Seconds to get a released device back, once it is no longer paid for. 0: immediately, as if there were no other
    users. State of sleeping replicas on the device is lost, so a cold start follows. Does not affect policies that
    always keep the whole cluster."""

    serverless: ServerlessSpec | None = None
    """Use serverless containers. Functions then share no devices, so placement must be `disaggregated`. `null`:
    ordinary machines."""

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

    They hold one actor per prompt of a step, plus the learner, which takes one machine by default.
    """
    return -(-(prompts * actor_devices + (learner_devices or devices_per_node)) // devices_per_node)


class TransportSpec(SpecModel):
    """How weights reach the actors at the start of a step. The defaults are the priors of
    rlhfless/scaling/fleet_constants.py, which gives their sources."""

    kind: SimulatedTransport = "auto"
    """As `weights.transport` of a run. `auto`: the learner writes a file to its node's memory, and each other node
    pulls it once. `nccl`: in addition, the learner broadcasts the weights to actors that are never released and share
    no GPU with it."""

    publish_bytes_per_s: Positive = PUBLISH_BYTES_PER_S.value
    """Rate at which the learner's first rank writes a version, in bytes per second."""

    pull_bytes_per_s: Positive = PULL_BYTES_PER_S.value
    """Total rate at which the learner's node sends a version to all other nodes, in bytes per second."""

    load_bytes_per_s: Positive = LOAD_BYTES_PER_S.value
    """Rate at which the engine loads a version, in bytes per second and device. Mixture-of-experts models take several
    times as long (docs/simulate.md)."""

    broadcast_bytes_per_s: Positive = BROADCAST_BYTES_PER_S.value
    """Rate at which one device receives its part of a broadcast, in bytes per second."""

    fixed_s: NotNegative = LOAD_FIXED_S.value
    """Fixed seconds per publication and per load, regardless of size."""

    @property
    def device_bytes_per_s(self) -> float:
        """Rate at which an actor's device gets new weights. Broadcast and load overlap, so the slower rate counts."""
        return min(self.broadcast_bytes_per_s, self.load_bytes_per_s) if self.kind == "nccl" else self.load_bytes_per_s


class DeclaredTimes(SpecModel):
    """Start, sleep and transport times from the priors of rlhfless/scaling/fleet_constants.py and from `transport`."""

    type: Literal["declared"] = "declared"


class MeasuredTimes(SpecModel):
    """Start, sleep and transport times as measured by a run or a self-test. Priors are used for anything not
    measured."""

    type: Literal["measured"] = "measured"

    path: str
    """A file written by `rlhfless simulate --calibrate`."""


FleetTimesSpec = Annotated[DeclaredTimes | MeasuredTimes, Field(discriminator="type")]


@dataclass(frozen=True, slots=True)
class DevicesByNode:
    """Part of the cluster's devices, by node, in the order in which they are used."""

    devices: tuple[tuple[str, tuple[Device, ...]], ...]
    """Pairs of a node and its devices."""

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
        """Return all devices except these."""
        names = {device.name for device in taken}
        return DevicesByNode(
            tuple((node, tuple(s for s in devices if s.name not in names)) for node, devices in self.devices)
        )

    def actors(self, devices_each: int) -> Iterator[tuple[str, tuple[Device, ...]]]:
        """Yield the node and devices of each actor. No actor spans two nodes."""
        for node, devices in self.devices:
            for first in range(0, len(devices) - devices_each + 1, devices_each):
                yield node, devices[first : first + devices_each]
