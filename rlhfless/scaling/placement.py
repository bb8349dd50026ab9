"""Assignment of devices, and shares of them, to functions. Pure. The entry point is `place`.

A device is a GPU or a CPU core of one node. Devices are planned by kind and count, in *groups*: a group is on one node,
and is acquired and released as a whole. The concrete devices of a group are known once the run holds it
(`rlhfless.fleet.run_devices`); a group may be planned before its node exists. The devices of a replica are in one
group, except the learner's, whose ranks may span several nodes.

Functions that share a device hold equal shares of it: its memory is occupied, so no other function can have that share.
The shares of a device add up to at most 1, which bounds the cost of a run by devices x price x time.
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
"""Devices assumed for a node that has not joined, if no node of its kind is present: GPU machines have eight."""


class PlacementError(UserError):
    """Raised if there are too few devices. The message names the function and the number of devices available."""

    where = "placement"


@dataclass(frozen=True, slots=True)
class Node:
    """The resources of a cluster node that runs can use."""

    name: str
    """Ray's node id."""
    address: str
    cores: int
    """CPU cores."""
    free_cores: int
    gpu_kind: str = ""
    """Key of the price book, such as `h100`; empty without GPUs. All GPUs of a node are of the same kind."""
    gpus: int = 0
    free_gpus: int = 0
    held: int = 0
    """Devices that the run itself holds; they count as free, and are taken first."""

    def count(self, kind: str) -> int:
        """Return the number of its devices of a kind, including those held by runs."""
        return self.cores if kind == CPU_KIND else self.gpus * (kind == self.gpu_kind)

    def free(self, kind: str) -> int:
        """Return the number of its unheld devices of a kind."""
        return self.free_cores if kind == CPU_KIND else self.free_gpus * (kind == self.gpu_kind)


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a run. It is bound to a node when the run acquires it."""

    name: str
    """The run's own name for it, such as `cpu-0`; also used in the ledger."""
    kind: str
    """Key of the price book, such as `cpu-core` or `h100`."""
    index: int
    """Position among the run's devices."""
    node: str = ""
    """Ray's id of its node; empty until acquired."""
    local_id: str = ""
    """The node's id for it: core number, or entry of CUDA_VISIBLE_DEVICES. Empty until acquired."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The devices of a replica, and its share of each."""

    devices: tuple[Device, ...]
    shares: tuple[float, ...]
    """The share of each device, 0 to 1 `[device]`."""
    lent: bool = False
    """Other runs use and pay for the devices while the replica sleeps."""

    @classmethod
    def of(cls, devices: Sequence[Device], share: float = 1.0) -> Allocation:
        """Return an allocation with an equal share of each device."""
        return cls(tuple(devices), (share,) * len(devices))

    @property
    def shared(self) -> Iterator[tuple[Device, float]]:
        """Iterate over the devices with their shares."""
        return zip(self.devices, self.shares, strict=True)

    def billed(self, state: ReplicaState) -> Iterator[tuple[Device, float]]:
        """Iterate over the devices with the share billed to a replica in this state."""
        away = self.lent and state is ReplicaState.SLEEPING
        return ((device, 0.0 if away else share) for device, share in self.shared)


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices of one node that a run acquires and releases together."""

    name: str
    """Unique within the run."""
    devices: tuple[Device, ...]
    node: str = ""
    """Name of the preferred node; another node is used if its devices are taken."""

    @property
    def kind(self) -> str:
        return self.devices[0].kind

    def bound(self, node: str, local_ids: Sequence[str]) -> dict[str, Device]:
        """Return the devices by name, bound to a node."""
        pairs = zip(self.devices, local_ids, strict=True)
        return {device.name: replace(device, node=node, local_id=local_id) for device, local_id in pairs}


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """A device group that an elastic run holds while its size changes."""

    name: str
    node: str
    kind: str
    devices: int


def with_held(nodes: Sequence[Node], held: Sequence[HeldGroup]) -> list[Node]:
    """Return the nodes with the devices of these groups counted as free."""

    def freed(node: Node) -> Node:
        cores, gpus = (
            sum(group.devices for group in held if group.node == node.name and (group.kind == CPU_KIND) is is_cpu)
            for is_cpu in (True, False)
        )
        free_cores, free_gpus = min(node.free_cores + cores, node.cores), min(node.free_gpus + gpus, node.gpus)
        return replace(node, free_cores=free_cores, free_gpus=free_gpus, held=gpus or cores)

    return [freed(node) for node in nodes]


@dataclass(frozen=True, slots=True)
class Placement:
    """An allocation for every replica that a run may start, and the device groups."""

    allocations: Mapping[str, tuple[Allocation, ...]]
    groups: tuple[DeviceGroup, ...]

    def allocation(self, function: str, index: int) -> Allocation:
        return self.allocations[function][index]

    def groups_of(self, allocation: Allocation) -> tuple[DeviceGroup, ...]:
        """Return the groups that contain an allocation's devices."""
        names = {device.name for device in allocation.devices}
        return tuple(group for group in self.groups if any(device.name in names for device in group.devices))


NO_PLACEMENT = Placement({}, ())
"""The placement of a run that has none yet."""


def rank_devices(devices: Sequence[Device], rank: int, ranks: int) -> tuple[Device, ...]:
    """Return a rank's part of a function's devices: neighbours on the node of its first device.

    Ranks share devices if there are more ranks than devices.
    """
    per_rank, left_over = divmod(len(devices), ranks)
    if not per_rank:
        return (devices[rank % len(devices)],)
    first = rank * per_rank + min(rank, left_over)
    part = devices[first : first + per_rank + (rank < left_over)]
    return tuple(device for device in part if device.node == part[0].node)


class Site(StrEnum):
    """Location of a function's replicas."""

    PER_REPLICA = "per_replica"
    """Each replica has neighbouring devices of one node, exclusively if there are enough: engines."""
    LEARNER = "learner"
    """One replica on all devices of the learner side."""
    LEARNER_SHARED = "learner_shared"
    """One replica with a device of the learner side per rank, shared with other functions there."""
    CPU = "cpu"
    """Like LEARNER_SHARED on CPU cores; if the run's devices are GPUs, on CPU cores of its own."""


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """The replicas that a function may have in a run."""

    function: str
    site: Site
    replicas: int = 1
    devices: int = 1
    """Devices of each replica for PER_REPLICA; number of its own cores for CPU."""
    ranks: int = 1
    """Processes of a sharded replica, at most one per device."""
    ranks_key: str = ""
    """The spec key that sets `ranks`."""
    one_node: bool = False
    """For LEARNER_SHARED: the devices are neighbours on one node, as those of an engine must be."""


def device_kind(spec: PlacementSpec, nodes: Sequence[Node]) -> str:
    """Return the device kind of a run, or of generation if the learner has another kind.

    This is the kind in the spec, else the GPUs of the cluster, else CPU cores. Raises PlacementError if the cluster has
    several kinds of GPU and the spec names none, or if the named kind is neither present nor obtainable.
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
    """Return the device kind of the learner side. Raises PlacementError like `device_kind`."""
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


def place(
    spec: PlacementSpec,
    nodes: Sequence[Node],
    functions: Sequence[ReplicaRequest],
    held: Sequence[HeldGroup] | None = None,
) -> Placement:
    """Assign an allocation to every replica.

    `held`: the groups of an elastic run, whose names the groups on the same nodes keep. Its groups have the devices of
    one actor, so that it can keep some of a node's. None: the run has one size.

    Co-located: the run's devices on each node form one group, because the learner has them all; actor i gets k
    neighbouring devices, `i*k .. i*k+k-1` on the first node. Disaggregated: the last `learner_devices` devices are the
    learner side, on one node if possible, and each actor has its own group. LEARNER_SHARED functions have one device
    per rank, assigned from the last device of the learner side to the first, one function after the other. Without
    actors the learner side is all devices. A learner side of another kind has its own devices.

    CPU cores may be shared by several actors; two engines on one GPU are refused.

    Raises PlacementError if a side has no device, an actor needs more devices than a node has, or a private cluster,
    which cannot grow, has too few.
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
    used = windows[:actors] if spec.mode == "disaggregated" else []
    name = engines[0].function if engines else ""
    taken = sum(len(node.devices) for node in by_node) if kind == CPU_KIND else 0
    chosen = _chosen(functions, windows, learning, of_learner, nodes, taken)
    names = _GroupNames(held or ())
    parts = learning if held is None else [part for node in learning for part in _parts(node, per_actor)]
    groups = [
        *(DeviceGroup(names.of(name, window), window.devices, window.name) for window in used),
        *(DeviceGroup(names.of("learner", part), part.devices, part.name) for part in parts),
        *(
            DeviceGroup(f"{wanted.function}-{number}", devices)
            for wanted in functions
            if _has_own_cores(wanted, of_learner)
            for number, devices in enumerate(chosen[wanted.function])
        ),
    ]
    if spec.tenants > 1:
        return Placement({w.function: tuple(_whole(w, chosen[w.function], kind)) for w in functions}, tuple(groups))
    return Placement(_with_shares(chosen), tuple(groups))


def _has_own_cores(wanted: ReplicaRequest, kind: str) -> bool:
    """Return whether a function runs on CPU cores while the run's devices are GPUs."""
    return wanted.site is Site.CPU and kind != CPU_KIND


def _chosen(
    functions: Sequence[ReplicaRequest],
    windows: Sequence[_NodeDevices],
    learning: Sequence[_NodeDevices],
    kind: str,
    nodes: Sequence[Node],
    first_core: int,
) -> dict[str, list[tuple[Device, ...]]]:
    """Return the devices of each replica of each function.

    `learning` and `kind` are those of the learner side; a function's own cores are numbered from `first_core`.
    """
    learner = [device for node in learning for device in node.devices]
    chosen: dict[str, list[tuple[Device, ...]]] = {}
    taken, next_window = 0, itertools.cycle(windows)
    for wanted in functions:
        if wanted.site is Site.PER_REPLICA:
            chosen[wanted.function] = [next(next_window).devices for _ in range(wanted.replicas)]
        elif wanted.site is Site.LEARNER:
            chosen[wanted.function] = [tuple(learner)]
        elif _has_own_cores(wanted, kind):
            count = _own_cores(wanted.devices, nodes)
            firsts = range(first_core, first_core + wanted.replicas * count, count)
            chosen[wanted.function] = [
                tuple(Device(f"cpu-{i}", CPU_KIND, i) for i in range(first, first + count)) for first in firsts
            ]
            first_core = firsts.stop
        elif wanted.one_node:
            most = max(len(node.devices) for node in learning)
            if wanted.ranks > most and kind != CPU_KIND:
                what = (
                    f"{wanted.ranks_key} is {wanted.ranks}, but no node of the learner has more than {most} device(s)"
                )
                raise PlacementError(what)
            node = next(node for node in reversed(learning) if len(node.devices) >= min(wanted.ranks, most))
            chosen[wanted.function] = [node.devices[-wanted.ranks :]]
        else:
            count = min(wanted.ranks, len(learner))
            chosen[wanted.function] = []
            for _ in range(wanted.replicas):
                places = sorted(-(taken + rank) % len(learner) for rank in range(1, count + 1))
                chosen[wanted.function].append(tuple(learner[place] for place in places))
                taken += count
        if wanted.site in (Site.LEARNER, Site.LEARNER_SHARED) and wanted.ranks > len(learner) and kind != CPU_KIND:
            raise PlacementError(f"{wanted.ranks_key} is {wanted.ranks}, but the learner has {len(learner)} device(s)")
    return chosen


@dataclass(frozen=True, slots=True)
class _NodeDevices:
    name: str
    """Name of the node; empty if it has not joined."""
    devices: tuple[Device, ...]


def _parts(node: _NodeDevices, size: int) -> Iterator[_NodeDevices]:
    """Yield a node's devices in parts of `size`; the last one may be smaller."""
    for first in range(0, len(node.devices), size):
        yield _NodeDevices(node.name, node.devices[first : first + size])


class _GroupNames:
    """Names the groups of a run: like a group that it holds on the same node, or by number."""

    def __init__(self, held: Sequence[HeldGroup]) -> None:
        self._held = list(held)
        self._taken = {group.name for group in held}

    def of(self, function: str, part: _NodeDevices) -> str:
        for group in self._held:
            same = (group.node, group.devices) == (part.name, len(part.devices))
            if same and group.name.rpartition("-")[0] == function:
                self._held.remove(group)
                return group.name
        name = next(name for i in itertools.count() if (name := f"{function}-{i}") not in self._taken)
        self._taken.add(name)
        return name


def _learner_nodes(
    spec: PlacementSpec, nodes: Sequence[Node], kind: str, count: int, first: int, key: str
) -> list[_NodeDevices]:
    """Return `count` devices of the learner side's own kind, numbered from `first`, on a single node if possible.

    The node has the fewest sufficient free devices, or else is the smallest that is large enough.
    """
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
    """Return the run's devices by node: free ones first, then devices held by others, then those of joining nodes.

    A joining node is assumed to have the same number of devices as the largest present node, and at least one actor's.
    If nodes may join and no present node fits an actor, co-located functions, which share their devices, wait for such
    nodes.
    """
    present = sum(node.count(kind) for node in nodes)
    wanted = spec.device_count or present
    if wanted > present and not spec.ray_address:
        raise PlacementError(f"{key} asks for {wanted} device(s) of kind {kind}, but {present} are there")
    if not wanted:
        raise PlacementError(
            f"the cluster has no devices of kind {kind}; if an autoscaler is to bring them, say how many with "
            "placement.devices"
        )
    largest = max((node.count(kind) for node in nodes), default=0)
    if largest < per_actor and spec.ray_address and spec.device_count and spec.mode != "disaggregated":
        nodes = ()
    left, taken = wanted, dict.fromkeys((node.name for node in nodes), 0)
    freest = sorted(nodes, key=lambda node: (-node.held, -node.free(kind)))
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
    """Return the devices of generation and of the learner side."""
    if spec.mode != "disaggregated":
        return by_node, by_node
    count, needed = sum(len(node.devices) for node in by_node), spec.learner_devices
    if count <= needed:
        raise PlacementError(
            f"placement.learner_devices is {needed} and the run has {count} device(s), which "
            "leaves none for generation; use mode colocated, or more devices"
        )
    # On one node if it has enough: the node that costs the fewest actors, and the smallest of these. Otherwise on
    # several.
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
    """Return the device windows for actors: disjoint neighbours on one node."""
    windows = [
        _NodeDevices(node.name, node.devices[first : first + size])
        for node in by_node
        for first in range(0, len(node.devices) - size + 1, size)
    ]
    count = sum(len(node.devices) for node in by_node)
    if spec.mode == "disaggregated" and spec.ray_address and spec.device_count:
        # The remainder of a node makes no actor; if nodes may join, those devices are requested on another node.
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
    """Return the number of cores for a function: the wanted number, capped at the largest node's."""
    return max(min(wanted, max((node.cores for node in nodes), default=wanted)), 1)


def _whole(wanted: ReplicaRequest, chosen: Sequence[tuple[Device, ...]], kind: str) -> Iterator[Allocation]:
    """Return a function's allocations on devices shared between runs.

    During its turn it has whole devices, and nothing else is billed for them. Scoring on shared cores takes no turns
    and pays nothing.
    """
    share = 0.0 if wanted.site is Site.CPU and kind == CPU_KIND else 1.0
    return (Allocation(devices, (share,) * len(devices), lent=True) for devices in chosen)


def _with_shares(
    chosen: Mapping[str, Sequence[tuple[Device, ...]]],
) -> dict[str, tuple[Allocation, ...]]:
    """Return allocations in which the replicas on a device have equal shares that add up to 1."""
    replicas_on = Counter(device for allocations in chosen.values() for devices in allocations for device in devices)

    def shared(devices: tuple[Device, ...]) -> Allocation:
        return Allocation(devices, tuple(1.0 / replicas_on[device] for device in devices))

    return {function: tuple(map(shared, allocations)) for function, allocations in chosen.items()}
