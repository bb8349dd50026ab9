"""Which devices each function may hold, and its share of each. Pure. `place` chooses them.

A device is a GPU or a CPU core of one node. Devices are planned by kind and count, in *groups*: a group is on one node,
and is taken and given back as a whole. Which devices of which node it is, is known when the run holds it
(`rlhfless.fleet.run_devices`); a group may be planned before its node is there. The devices of one replica are in one
group, except the learner's, whose ranks may be on several nodes.

Functions that share a device hold equal shares of it: its memory is occupied and no other function can have that share.
The shares of a device add up to at most 1, which makes the bill of a run at most devices x price x time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

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

    PER_REPLICA = "per_replica"
    """Each replica on neighbouring devices of one node, its own where there are enough: engines."""
    LEARNER = "learner"
    """One replica on all devices of the learner's side."""
    LEARNER_SHARED = "learner_shared"
    """One replica on as many devices of the learner's side as it has ranks, shared with other functions there."""
    CPU = "cpu"
    """As LEARNER_SHARED on CPU cores; where the run's devices are GPUs, on CPU cores of its own."""


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """The replicas that a function may have in a run."""

    function: str
    site: Site
    replicas: int = 1
    devices: int = 1
    """Devices of each replica of PER_REPLICA; cores of its own of CPU."""
    ranks: int = 1
    """Processes of a replica that is split, at most one per device."""
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


def place(spec: PlacementSpec, nodes: Sequence[Node], functions: Sequence[ReplicaRequest]) -> Placement:
    """Give every replica its allocation.

    Co-located: the run's devices of each node are one group, because the learner has them all; actor i has k
    neighbours of them, `i*k .. i*k+k-1` on the first node. Disaggregated: the last `learner_devices` devices are the
    learner side, on one node if it fits, and each actor has a group of its own. Functions of LEARNER_SHARED have a
    device for each rank: from the last device of the learner side to the first, one function after the other. Without
    actors the learner side is all devices. Where the number of its ranks may change, each device of that side is a
    group of its own, which is taken and given back by itself. A learner side of another kind has its own devices.

    On CPU cores there may be more actors than devices, and they share them. Two engines on one GPU are refused.

    Raises PlacementError if a side has no device, if an actor needs more devices than a node has, or if the cluster
    has fewer and cannot grow, because it is private.
    """
    engines = [wanted for wanted in functions if wanted.site is Site.PER_REPLICA]
    kind, per_actor = device_kind(spec, nodes), max((wanted.devices for wanted in engines), default=1)
    by_node = _by_node(spec, nodes, kind, per_actor)
    generation: Sequence[_NodeDevices] = by_node
    learning: Sequence[_NodeDevices] = by_node
    of_learner = learner_kind(spec, nodes)
    if of_learner != kind:
        first = sum(len(node.devices) for node in by_node)
        learning = _learner_nodes(spec, nodes, of_learner, spec.learner_devices, first, "placement.learner_devices")
    elif engines:
        generation, learning = _sides(spec, by_node, per_actor)
    actors = sum(wanted.replicas for wanted in engines)
    windows = _windows(spec, generation, per_actor, engines, kind) if engines else []
    learner = [device for node in learning for device in node.devices]
    used = windows[:actors] if spec.mode == "disaggregated" else []
    name = engines[0].function if engines else ""
    if (not engines or generation is not learning) and any(wanted.elastic for wanted in functions):
        learning = _one_by_one(learning)
    taken = sum(len(node.devices) for node in by_node) if kind == CPU_KIND else 0
    chosen = _chosen(functions, windows, learner, of_learner, nodes, taken)
    groups = [
        *(DeviceGroup(f"{name}-{i}", window.devices, window.name) for i, window in enumerate(used)),
        *(DeviceGroup(f"learner-{i}", node.devices, node.name) for i, node in enumerate(learning)),
        *(DeviceGroup(f"{w.function}-0", chosen[w.function][0]) for w in functions if _has_own_cores(w, of_learner)),
    ]
    if spec.tenants > 1:
        return Placement({w.function: tuple(_whole(w, chosen[w.function], kind)) for w in functions}, tuple(groups))
    return Placement(_with_shares(chosen), tuple(groups))


def _one_by_one(nodes: Sequence[_NodeDevices]) -> list[_NodeDevices]:
    """Each device by itself."""
    return [_NodeDevices(node.name, (device,)) for node in nodes for device in node.devices]


def _has_own_cores(wanted: ReplicaRequest, kind: str) -> bool:
    """Whether a function works on CPU cores where the run's devices are GPUs."""
    return wanted.site is Site.CPU and kind != CPU_KIND


def _chosen(
    functions: Sequence[ReplicaRequest],
    windows: Sequence[_NodeDevices],
    learner: Sequence[Device],
    kind: str,
    nodes: Sequence[Node],
    first_core: int,
) -> dict[str, list[tuple[Device, ...]]]:
    """The devices of each replica of each function. `kind`: of the learner side; cores of a function's own are numbered
    from `first_core`."""
    chosen: dict[str, list[tuple[Device, ...]]] = {}
    taken, next_window = 0, itertools.cycle(windows)
    for wanted in functions:
        if wanted.site is Site.PER_REPLICA:
            chosen[wanted.function] = [next(next_window).devices for _ in range(wanted.replicas)]
        elif wanted.site is Site.LEARNER:
            chosen[wanted.function] = [tuple(learner)]
        elif _has_own_cores(wanted, kind):
            count = _own_cores(wanted.devices, nodes)
            chosen[wanted.function] = [
                tuple(Device(f"cpu-{i}", CPU_KIND, i) for i in range(first_core, first_core + count))
            ]
        else:
            count = min(wanted.ranks, len(learner))
            places = sorted(-(taken + rank) % len(learner) for rank in range(1, count + 1))
            chosen[wanted.function] = [tuple(learner[place] for place in places)]
            taken += count
        if wanted.site in (Site.LEARNER, Site.LEARNER_SHARED) and wanted.ranks > len(learner) and kind != CPU_KIND:
            raise PlacementError(f"{wanted.ranks_key} is {wanted.ranks}, but the learner has {len(learner)} device(s)")
    return chosen


@dataclass(frozen=True, slots=True)
class _NodeDevices:
    """Devices of one node."""

    name: str
    """Of the node; empty for one that has to come."""
    devices: tuple[Device, ...]


def _learner_nodes(
    spec: PlacementSpec, nodes: Sequence[Node], kind: str, count: int, first: int, key: str
) -> list[_NodeDevices]:
    """So many devices of a kind of its own for the learner side, numbered from `first`: on one node if it has enough,
    the one with the fewest that are free, or else the smallest."""
    free = sorted((node for node in nodes if node.free(kind) >= count), key=lambda node: node.free(kind))
    there = sorted((node for node in nodes if node.count(kind) >= count), key=lambda node: node.count(kind))
    own = spec.model_copy(update={"devices": count})
    return _by_node(own, [*free, *there][:1] or nodes, kind, 1, first, key)


def _by_node(
    spec: PlacementSpec,
    nodes: Sequence[Node],
    kind: str,
    per_actor: int,
    first: int = 0,
    key: str = "placement.devices",
) -> list[_NodeDevices]:
    """The run's devices, node by node: free ones first, then what others hold now, then what nodes that may come
    have: as many as the largest that is there, and at least one actor's. Where nodes may come and none that is there
    holds an actor, co-located functions, which share their devices, wait for such nodes."""
    present = sum(node.count(kind) for node in nodes)
    wanted = spec.devices or present
    if wanted > present and not spec.ray_address:
        raise PlacementError(f"{key} asks for {wanted} device(s) of kind {kind}, but {present} are there")
    if not wanted:
        raise PlacementError(
            f"the cluster has no devices of kind {kind}; if an autoscaler is to bring them, say how many with "
            "placement.devices"
        )
    largest = max((node.count(kind) for node in nodes), default=0)
    if largest < per_actor and spec.ray_address and spec.devices and spec.mode != "disaggregated":
        nodes = ()
    left, taken = wanted, dict.fromkeys((node.name for node in nodes), 0)
    freest = sorted(nodes, key=lambda node: -node.free(kind))
    for most in (Node.free, Node.count):
        for node in freest:
            more = max(min(left, most(node, kind) - taken[node.name]), 0)
            taken[node.name] += more
            left -= more
    sizes = [(node.name, taken[node.name]) for node in freest if taken[node.name]]
    to_come = max(largest or NODE_DEVICES, per_actor)
    while left:
        sizes.append(("", min(left, to_come)))
        left -= sizes[-1][1]
    prefix = "cpu" if kind == CPU_KIND else "gpu"
    numbered = iter([Device(f"{prefix}-{i}", kind, i) for i in range(first, first + wanted)])
    return [_NodeDevices(name, tuple(islice(numbered, size))) for name, size in sizes]


def _sides(
    spec: PlacementSpec, by_node: Sequence[_NodeDevices], per_actor: int
) -> tuple[Sequence[_NodeDevices], Sequence[_NodeDevices]]:
    """The devices of generation and of the learner side."""
    if spec.mode != "disaggregated":
        return by_node, by_node
    count, needed = sum(len(node.devices) for node in by_node), spec.learner_devices
    if count <= needed:
        raise PlacementError(
            f"placement.learner_devices is {needed} and the run has {count} device(s), which "
            "leaves none for generation; use mode colocated, or more devices"
        )
    # On one node if it has enough: where that costs the fewest actors, and of such the smallest. Otherwise on several.
    enough = [node for node in reversed(by_node) if len(node.devices) >= needed]

    def cost(node: _NodeDevices) -> tuple[int, int]:
        size = len(node.devices)
        return size // per_actor - (size - needed) // per_actor, size

    order = [min(enough, key=cost)] if enough else list(reversed(by_node))
    learning: list[_NodeDevices] = []
    rest = {id(node): node for node in by_node}
    for node in order:
        part = min(needed, len(node.devices))
        needed -= part
        if part:
            learning.insert(0, _NodeDevices(node.name, node.devices[-part:]))
            rest[id(node)] = _NodeDevices(node.name, node.devices[:-part])
    return [node for node in rest.values() if node.devices], learning


def _windows(
    spec: PlacementSpec, by_node: Sequence[_NodeDevices], size: int, engines: Sequence[ReplicaRequest], kind: str
) -> list[_NodeDevices]:
    """Where actors may sit: neighbours on one node, and no device twice."""
    windows = [
        _NodeDevices(node.name, node.devices[first : first + size])
        for node in by_node
        for first in range(0, len(node.devices) - size + 1, size)
    ]
    count = sum(len(node.devices) for node in by_node)
    if spec.mode == "disaggregated" and spec.ray_address and spec.devices:
        # What is left of each node makes no actor; where nodes may come, it is asked for on another one.
        left = [device for node in by_node for device in node.devices[len(node.devices) // size * size :]]
        windows += [_NodeDevices("", tuple(left[i : i + size])) for i in range(0, len(left) - size + 1, size)]
    if not windows:
        most = max(len(node.devices) for node in by_node)
        on_one = "" if most == count else f", and not more than {most} of them on one node"
        raise PlacementError(
            f"generation.engine.tensor_parallel_size is {size}, but generation has {count} device(s){on_one}; lower "
            "it, or raise placement.devices"
        )
    if sum(wanted.replicas for wanted in engines) > len(windows) and kind != CPU_KIND:
        asked = " and ".join(f"scaling.{wanted.function}.max_actors is {wanted.replicas}" for wanted in engines)
        raise PlacementError(
            f"{asked}, with {size} device(s) each, but generation has {count} "
            f"device(s) of kind {kind}, enough for {len(windows)} actor(s); lower it, or raise placement.devices"
        )
    return windows


def _own_cores(wanted: int, nodes: Sequence[Node]) -> int:
    """The number of cores that a function wants, or of the largest node if that has fewer."""
    return max(min(wanted, max((node.cores for node in nodes), default=wanted)), 1)


def _whole(wanted: ReplicaRequest, chosen: Sequence[tuple[Device, ...]], kind: str) -> Iterator[Allocation]:
    """The allocations of a function on devices that runs share: in its turn it has all of a device, and nothing else is
    billed for it. Scoring takes no turns on the cores that others work on, and pays for nothing there."""
    share = 0.0 if wanted.site is Site.CPU and kind == CPU_KIND else 1.0
    return (Allocation(devices, (share,) * len(devices), lent=True) for devices in chosen)


def _with_shares(
    chosen: Mapping[str, Sequence[tuple[Device, ...]]],
) -> dict[str, tuple[Allocation, ...]]:
    """The allocations of devices: the replicas on a device have equal shares of it, which add up to 1."""
    replicas_on = Counter(device for allocations in chosen.values() for devices in allocations for device in devices)

    def shared(devices: tuple[Device, ...]) -> Allocation:
        return Allocation(devices, tuple(1.0 / replicas_on[device] for device in devices))

    return {function: tuple(map(shared, allocations)) for function, allocations in chosen.items()}
