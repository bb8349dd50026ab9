"""An allocation for each replica that a run may start. Pure.

Free devices come first, node by node; the learner's side is on one node if it fits, and each actor is on one node.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from rlhfless.scaling.placement import (
    CPU_KIND,
    NODE_DEVICES,
    Allocation,
    Device,
    DeviceGroup,
    Node,
    Placement,
    PlacementError,
    Site,
    Wanted,
    device_kind,
    learner_kind,
)
from rlhfless.spec import PlacementSpec


def place(spec: PlacementSpec, nodes: Sequence[Node], functions: Sequence[Wanted]) -> Placement:
    """Give every replica its allocation.

    Co-located: the run's devices of each node are one group, because the learner has them all; actor i has k
    neighbours of them, `i*k .. i*k+k-1` on the first node. Disaggregated: the last `learner_devices` devices are the
    learner side, on one node if it fits, and each actor has a group of its own. Functions BESIDE have a device for each
    rank: from the last device of the learner side to the first, one function after the other. Without actors the
    learner side is all devices. Where the number of its ranks may change, each device of that side is a group of its
    own, which is taken and given back by itself. A learner side of another kind has its devices beside the others.

    On CPU cores there may be more actors than devices, and they share them. Two engines on one GPU are refused.

    Raises PlacementError if a side has no device, if an actor needs more devices than a node has, or if the cluster
    has not so many and cannot grow, because it is private.
    """
    engines = [wanted for wanted in functions if wanted.site is Site.WINDOWS]
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


def _has_own_cores(wanted: Wanted, kind: str) -> bool:
    """Whether a function works on CPU cores where the run's devices are GPUs."""
    return wanted.site is Site.CORES and kind != CPU_KIND


def _chosen(
    functions: Sequence[Wanted],
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
        if wanted.site is Site.WINDOWS:
            chosen[wanted.function] = [next(next_window).devices for _ in range(wanted.replicas)]
        elif wanted.site is Site.SIDE:
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
        if wanted.site in (Site.SIDE, Site.BESIDE) and wanted.ranks > len(learner) and kind != CPU_KIND:
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
    spec: PlacementSpec, by_node: Sequence[_NodeDevices], size: int, engines: Sequence[Wanted], kind: str
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


def _whole(wanted: Wanted, chosen: Sequence[tuple[Device, ...]], kind: str) -> Iterator[Allocation]:
    """The allocations of a function on devices that runs share: in its turn it has all of a device, and nothing else is
    billed for it. Scoring takes no turns on the cores that others work on, and pays for nothing there."""
    share = 0.0 if wanted.site is Site.CORES and kind == CPU_KIND else 1.0
    return (Allocation(devices, (share,) * len(devices), lent=True) for devices in chosen)


def _with_shares(
    chosen: Mapping[str, Sequence[tuple[Device, ...]]],
) -> dict[str, tuple[Allocation, ...]]:
    """The allocations of devices: the replicas on a device have equal shares of it, which add up to 1."""
    replicas_on = Counter(device for allocations in chosen.values() for devices in allocations for device in devices)

    def shared(devices: tuple[Device, ...]) -> Allocation:
        return Allocation(devices, tuple(1.0 / replicas_on[device] for device in devices))

    return {function: tuple(map(shared, allocations)) for function, allocations in chosen.items()}
