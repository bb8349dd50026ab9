"""Which devices each function may hold, and how much of them. Pure. `placing` chooses them.

A device is a GPU or a CPU core of one node. Devices are planned by kind and count, in *groups*: a group is on one node,
and is taken and given back as a whole. Which devices of which node it is, is known when the run holds it
(`rlhfless.fleet.run_devices`); a group may be planned before its node is there. The devices of one replica are in one
group, except the learner's, whose ranks may be on several nodes.

Functions that share a device hold equal shares of it: its memory is occupied and no other function can have that share.
The shares of a device add up to at most 1, which makes the bill of a run at most devices x price x time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rlhfless.records import ReplicaState
from rlhfless.spec import PlacementSpec
from rlhfless.util.errors import UserError

CPU_KIND = "cpu-core"
"""Device kind of a CPU core in the price book."""

NODE_DEVICES = 8
"""Devices of a node that is not there yet, where no node of the kind is there to go by: GPU machines have eight."""


class PlacementError(UserError):
    """The devices do not suffice; the text says what for and how many are there."""

    where = "placement"


@dataclass(frozen=True, slots=True)
class Node:
    """What a node of the cluster has for runs."""

    name: str
    """Ray's id of it."""
    address: str
    cores: int
    """CPU cores."""
    free_cores: int
    gpu_kind: str = ""
    """Key of the price book, such as `h100`; empty without GPUs. All GPUs of a node are of one kind."""
    gpus: int = 0
    free_gpus: int = 0

    def count(self, kind: str) -> int:
        """Its devices of a kind, whatever runs hold of them."""
        return self.cores if kind == CPU_KIND else self.gpus * (kind == self.gpu_kind)

    def free(self, kind: str) -> int:
        """Its devices of a kind that nothing holds."""
        return self.free_cores if kind == CPU_KIND else self.free_gpus * (kind == self.gpu_kind)


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a run: planned at first, and of a certain node when the run holds it."""

    name: str
    """Such as `cpu-0`: the run's own name for it, in the ledger too."""
    kind: str
    """Key of the price book, such as `cpu-core` or `h100`."""
    index: int
    """Number among the run's devices."""
    node: str = ""
    """Ray's id of its node; empty while it is only planned."""
    local_id: str = ""
    """What the node calls it: number of the core, or entry of CUDA_VISIBLE_DEVICES. Empty while it is only planned."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The devices of one replica, and its share of each."""

    devices: tuple[Device, ...]
    shares: tuple[float, ...]
    """The share of each device, 0 to 1 `[device]`."""
    lent: bool = False
    """Other runs work on the devices while the replica sleeps, and pay for them."""
    ranks: int | None = None
    """Ranks of a replica there, where they are not as many as the function wants."""

    @classmethod
    def of(cls, devices: Sequence[Device], share: float = 1.0) -> Allocation:
        """An equal share of each device."""
        return cls(tuple(devices), (share,) * len(devices))

    @property
    def shared(self) -> Iterator[tuple[Device, float]]:
        """Each device with the share of it."""
        return zip(self.devices, self.shares, strict=True)

    def billed(self, state: ReplicaState) -> Iterator[tuple[Device, float]]:
        """Each device with the share of it that a replica in this state pays for."""
        away = self.lent and state is ReplicaState.SLEEPING
        return ((device, 0.0 if away else share) for device, share in self.shared)


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices of one node, which a run takes and gives back together."""

    name: str
    """Unique in the run."""
    devices: tuple[Device, ...]
    node: str = ""
    """Name of the node that they are planned on: asked for first, and another one if its devices are taken by then."""

    @property
    def kind(self) -> str:
        """The kind of all its devices."""
        return self.devices[0].kind

    def bound(self, node: str, local_ids: Sequence[str]) -> dict[str, Device]:
        """The devices by name, when they are known."""
        pairs = zip(self.devices, local_ids, strict=True)
        return {device.name: replace(device, node=node, local_id=local_id) for device, local_id in pairs}


@dataclass(frozen=True, slots=True)
class Placement:
    """An allocation for every replica that a run may start, and the groups that their devices are in."""

    allocations: Mapping[str, tuple[Allocation, ...]]
    groups: tuple[DeviceGroup, ...]

    def allocation(self, function: str, index: int) -> Allocation:
        """The allocation of a function's replica number `index`."""
        return self.allocations[function][index]

    def groups_of(self, allocation: Allocation) -> tuple[DeviceGroup, ...]:
        """The groups that an allocation's devices are in."""
        names = {device.name for device in allocation.devices}
        return tuple(group for group in self.groups if any(device.name in names for device in group.devices))


def rank_devices(devices: Sequence[Device], rank: int, ranks: int) -> tuple[Device, ...]:
    """A rank's part of a function's devices: neighbours, on the node of the first of them. More ranks than devices
    share them."""
    per_rank, left_over = divmod(len(devices), ranks)
    if not per_rank:
        return (devices[rank % len(devices)],)
    first = rank * per_rank + min(rank, left_over)
    part = devices[first : first + per_rank + (rank < left_over)]
    return tuple(device for device in part if device.node == part[0].node)


class Site(StrEnum):
    """Where a function's replicas are."""

    WINDOWS = "windows"
    """Each replica on neighbouring devices of one node, and with devices of its own where there are enough: engines."""
    SIDE = "side"
    """One replica on all devices of the learner's side."""
    BESIDE = "beside"
    """One replica on as many devices of the learner's side as it has ranks, beside what else is there."""
    CORES = "cores"
    """As BESIDE on CPU cores; where the run's devices are GPUs, on CPU cores of its own."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The replicas that a function may have in a run."""

    function: str
    site: Site
    replicas: int = 1
    devices: int = 1
    """Devices of each replica in WINDOWS; cores of its own in CORES."""
    ranks: int = 1
    """Processes of a replica that is split, one for each device if there are so many."""
    ranks_key: str = ""
    """The key of the spec that sets `ranks`."""
    fewest_ranks: int | None = None
    """Ranks that the replica may shrink to; None: it does not."""

    @property
    def elastic(self) -> bool:
        """Whether the number of its ranks may change."""
        return self.fewest_ranks is not None and self.fewest_ranks < self.ranks


def device_kind(spec: PlacementSpec, nodes: Sequence[Node]) -> str:
    """The kind of a run's devices, or of generation's where the learner's are of another: what the spec names, or the
    GPUs of the cluster, or CPU cores where it has none.

    Raises PlacementError if the cluster has several kinds of GPU and the spec names none, or none of the kind that it
    names and cannot get any.
    """
    kinds = sorted({node.gpu_kind for node in nodes if node.gpus})
    if spec.kind is None:
        others = [kind for kind in kinds if kind != spec.learner_kind]
        if len(others) > 1:
            raise PlacementError(f"the cluster has devices of kinds {', '.join(others)}; name one with placement.kind")
        if kinds and not others:
            raise PlacementError(
                f"the cluster has GPUs of the learner's kind only, {kinds[0]}; name generation's with placement.kind"
            )
        return others[0] if others else CPU_KIND
    _require_known("placement.kind", spec.kind, kinds, may_come=bool(spec.ray_address and spec.devices))
    return spec.kind


def learner_kind(spec: PlacementSpec, nodes: Sequence[Node]) -> str:
    """The kind of the devices of the learner side. Raises PlacementError as `device_kind` does."""
    if spec.learner_kind is None:
        return device_kind(spec, nodes)
    kinds = sorted({node.gpu_kind for node in nodes if node.gpus})
    _require_known("placement.learner_kind", spec.learner_kind, kinds, may_come=bool(spec.ray_address))
    return spec.learner_kind


def _require_known(key: str, kind: str, kinds: Sequence[str], *, may_come: bool) -> None:
    if kind == CPU_KIND or kind in kinds or may_come:
        return
    raise PlacementError(
        f"{key} is {kind!r}, but the cluster has {', '.join([*kinds, CPU_KIND])}; name one of these. If an autoscaler "
        "is to bring nodes of the kind, say how many devices with placement.devices, and join the cluster with "
        "placement.ray_address"
    )
