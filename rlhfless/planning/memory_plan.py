"""The memory that a run holds on every device, and whether it fits. Pure: from a spec, a model's sizes and a kind of
device.

An engine keeps its share of a device, and torch keeps memory that it has once had. So a device must hold the largest
phase of each of its functions at once. Where functions take turns (`placement.turns`), it must hold the largest phase
of all, and what the process of each other function keeps.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhfless.functions.generation.kind import kv_tokens
from rlhfless.functions.learner.kind import learner_phases
from rlhfless.scaling.function_specs import MemoryTerms, Rewards, kinds_of, place_run, replica_requests
from rlhfless.scaling.latency.devices import DeviceSheet, device_of
from rlhfless.scaling.latency.shape import DTYPE_BYTES, ModelShape
from rlhfless.scaling.memory import (
    CACHED_VERSIONS,
    GIB,
    STAYS,
    MemoryPhase,
    kept_bytes,
    stored_versions,
    version_bytes,
    without_head,
)
from rlhfless.scaling.placement import CPU_KIND, NODE_DEVICES, Device, Node, Placement, PlacementError, Site
from rlhfless.spec import RunSpec, ScheduleSpec

MOST_TOKENS = 2**24
"""Upper bound of the search for the largest micro-batch: more than any step has."""

HOST_CORES = 64
"""Cores of a GPU machine, for placements that are only planned: more than scoring takes."""


@dataclass(frozen=True, slots=True)
class FunctionPlan:
    """A replica or rank of a function on one device: its phases, of which the largest counts."""

    function: str
    phases: tuple[MemoryPhase, ...]
    publishes: bool = False
    """See FunctionSpec."""

    @property
    def largest(self) -> MemoryPhase:
        return max(self.phases, key=lambda phase: phase.size_bytes)

    @property
    def asleep_bytes(self) -> int:
        """The bytes that stay on the device while the function sleeps."""
        return sum(part.size_bytes for part in self.largest.parts if part.name in STAYS)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One device, or several that hold the same."""

    count: int
    kind: str
    memory_bytes: int
    functions: tuple[FunctionPlan, ...]
    turns: bool = False
    """Whether its functions take turns."""
    guests: int = 0
    """Other runs that sleep on it, each counted like this one."""

    @property
    def size_bytes(self) -> int:
        """The most that is held at a time."""
        held = [part.largest.size_bytes for part in self.functions]
        if not self.turns:
            return sum(held)
        asleep = [part.asleep_bytes for part in self.functions]
        return (1 + self.guests) * sum(asleep) + max(map(int.__sub__, held, asleep), default=0)

    @property
    def usable_bytes(self) -> int:
        """The bytes that a plan may fill."""
        return self.memory_bytes if self.kind == CPU_KIND else device_of(self.kind).usable_bytes

    @property
    def fits(self) -> bool:
        return self.size_bytes <= self.usable_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a run on devices of a kind."""

    devices: tuple[DevicePlan, ...]
    kv_tokens: int | None
    """Tokens that the KV cache of one actor holds in sequences of `sequence_tokens`; None without actors."""
    sequence_tokens: int
    """The longest sequence."""
    micro_batch_tokens: int
    """The largest micro-batch that fits beside what else is on the learner's devices; 0 if none does."""
    host_bytes: int
    """The host memory needed, over all nodes: ranks load their shards in float32 before they move them, or keep them
    there with gradients and optimiser; on CPU cores all that the functions hold."""
    shared_bytes: int
    """The shared memory needed on the learner's node: the store of weights."""
    cache_bytes: int
    """The shared memory needed on each other node: its cache of the store."""
    checkpoint_bytes: int
    """The host memory needed over the nodes of learner and critic while a checkpoint is written in the background: a
    copy of master weights and moments. Where it is not free the run waits for the checkpoint."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What does not fit; empty if everything fits."""
        problems = [
            f"{device.kind}: {_gib(device.size_bytes)} are needed and {_gib(device.usable_bytes)} are usable ("
            + ", ".join(
                f"{part.function} {_gib(part.largest.size_bytes)} in {part.largest.name}" for part in device.functions
            )
            + ")"
            for device in self.devices
            if not device.fits
        ]
        if self.kv_tokens is not None and self.kv_tokens < self.sequence_tokens:
            problems.append(
                f"generation: room for {max(self.kv_tokens, 0):,} tokens of KV on an actor, and one sequence may have "
                f"{self.sequence_tokens:,}"
            )
        return tuple(problems)

    @property
    def fits(self) -> bool:
        return not self.problems


def memory_plan(
    spec: RunSpec,
    shape: ModelShape,
    sheet: DeviceSheet,
    count: int,
    sequence_tokens: int,
    host_bytes: int,
    rewards: Rewards = (),
    draft: ModelShape | None = None,
) -> MemoryPlan:
    """The plan of a run on `count` devices of a kind (and those of its `placement.learner_kind`), whose sequences have
    at most `sequence_tokens`.

    `host_bytes`: memory of one machine, which is the devices' own on CPU cores. `rewards`: sizes of the reward models
    that are known; `draft`: those of a draft model. Raises PlacementError if there are too few devices.
    """
    of_learner = learner_sheet(spec, sheet)
    memory = {each.kind: _memory_bytes(each, host_bytes) for each in (sheet, of_learner)}
    windows = MemoryTerms(spec, shape, sheet, sequence_tokens, rewards, draft)
    beside = replace(windows, sheet=of_learner)
    engines = {wanted.function for wanted in replica_requests(spec) if wanted.site is Site.PER_REPLICA}
    kinds = {
        kind.name: FunctionPlan(kind.name, kind.phases(windows if kind.name in engines else beside), kind.publishes)
        for kind in kinds_of(spec)
    }
    counted = [name for name, plan in kinds.items() if plan.phases]
    alike = Counter(
        (device.kind, tuple(sorted(names)))
        for device, names in _names_by_device(spec, sheet.kind, count, counted).items()
    )
    plans = []
    for (kind, names), times in sorted(alike.items(), key=lambda item: item[0][::-1]):
        parts = [kinds[name] for name in names]
        plans.append(
            DevicePlan(times, kind, memory[kind], tuple(parts), spec.placement.in_turns, spec.placement.tenants - 1)
        )
    store = 0 if spec.supervised else version_bytes(shape, spec.model.dtype)
    headless = {"critic", "learner"} if spec.type == "reward_model" else {"critic"}
    sizes = {name: (without_head(shape) if name in headless else shape).parameters for name in spec.trained}
    weights = {name: 4 * sizes[name] * part.copies for name, part in spec.trained.items()}
    # What a checkpoint copies, and what waits in the host's memory in turns: master weights, moments, an average.
    kept = {
        name: kept_bytes(size, averaged=spec.trained[name].average_decay is not None) for name, size in weights.items()
    }
    offloaded = sum(weights[name] + kept[name] for name, part in spec.trained.items() if part.offload)
    waiting = kept if spec.placement.in_turns else weights  # all are loaded by way of the host
    on_devices = sum(waiting[name] for name, part in spec.trained.items() if not part.offload)
    loaded = on_devices + _frozen_bytes(spec, shape, rewards)
    held = offloaded + (0 if of_learner.kind == CPU_KIND else loaded)
    held += sum(plan.count * plan.size_bytes for plan in plans if plan.kind == CPU_KIND)
    return MemoryPlan(
        devices=(
            *(plan for plan in plans if plan.kind != CPU_KIND),
            *_as_one([plan for plan in plans if plan.kind == CPU_KIND]),
        ),
        kv_tokens=None if spec.supervised else kv_tokens(spec, shape, sheet, sequence_tokens, draft),
        sequence_tokens=sequence_tokens,
        micro_batch_tokens=_largest_micro_batch(beside, plans),
        host_bytes=held,
        shared_bytes=stored_versions(spec) * store,
        cache_bytes=CACHED_VERSIONS * store,
        checkpoint_bytes=sum(kept.values()) if spec.checkpoint.background else 0,
    )


def learner_sheet(spec: RunSpec, sheet: DeviceSheet) -> DeviceSheet:
    """The devices of the learner's side, where `sheet` is of generation's. Raises UnknownDevice."""
    return sheet if spec.placement.learner_kind is None else device_of(spec.placement.learner_kind)


def _memory_bytes(sheet: DeviceSheet, host_bytes: int) -> int:
    return host_bytes if sheet.kind == CPU_KIND else int(sheet.memory_bytes.value)


def _as_one(plans: Sequence[DevicePlan]) -> tuple[DevicePlan, ...]:
    """The cores of a machine, which share its memory."""
    if len(plans) == 1 and plans[0].count == 1:
        return (plans[0],)
    functions = tuple(part for plan in plans for part in plan.functions for _ in range(plan.count))
    # Each of several cores has its own turns, and this is the memory of all: counted as without turns, to be safe.
    return (DevicePlan(1, CPU_KIND, plans[0].memory_bytes, functions),) if plans else ()


def held_devices(spec: RunSpec, kind: str, count: int) -> dict[str, float]:
    """The devices that each function holds in a run on `count` of a kind; of those that it shares, its shares. Raises
    PlacementError."""
    allocations = _placement(spec, kind, count).allocations
    return {function: math.fsum(share for each in of for share in each.shares) for function, of in allocations.items()}


def nodes_of(spec: RunSpec, function: str, kind: str, count: int) -> tuple[int, ...]:
    """The number of a function's devices on each of its nodes; empty if there are too few devices."""
    try:
        placement = _placement(spec, kind, count)
    except PlacementError:
        return ()
    allocation = placement.allocation(function, 0)
    groups = placement.groups_of(allocation)
    return tuple(len(set(group.devices) & set(allocation.devices)) for group in groups)


def _placement(spec: RunSpec, kind: str, count: int) -> Placement:
    asked = spec.placement.model_copy(update={"kind": kind, "devices": count})
    nodes = _nodes(kind, count)
    if asked.learner_kind is not None:
        nodes += _nodes(asked.learner_kind, asked.learner_devices, first=len(nodes))
    return place_run(spec.model_copy(update={"placement": asked}), nodes)


def _names_by_device(spec: RunSpec, kind: str, count: int, names: Sequence[str]) -> Mapping[Device, list[str]]:
    """The functions, of these, that have a replica or rank on each device, once for each replica or rank."""
    placement = _placement(spec, kind, count)
    by_device: defaultdict[Device, list[str]] = defaultdict(list)
    for wanted in (wanted for wanted in replica_requests(spec) if wanted.function in names):
        for allocation in placement.allocations[wanted.function]:
            devices = allocation.devices
            if wanted.site is not Site.PER_REPLICA:
                devices = tuple(devices[rank % len(devices)] for rank in range(wanted.ranks))
            for device in devices:
                by_device[device].append(wanted.function)
    return by_device


def _nodes(kind: str, count: int, first: int = 0) -> list[Node]:
    """Machines with `count` devices: one with all CPU cores, or machines of eight GPUs; numbered from `first`."""
    if kind == CPU_KIND:
        return [Node(str(first), "", count, count)]
    sizes = [min(NODE_DEVICES, count - taken) for taken in range(0, count, NODE_DEVICES)]
    return [Node(str(first + i), "", HOST_CORES, HOST_CORES, kind, size, size) for i, size in enumerate(sizes)]


def _frozen_bytes(spec: RunSpec, shape: ModelShape, rewards: Rewards) -> int:
    """The host's bytes while reference and reward models are loaded: each in its own format."""
    reference = DTYPE_BYTES[spec.learner.dtype] * shape.parameters if spec.needs_reference else 0
    return reference + sum(DTYPE_BYTES[part.dtype] * of.parameters for part, of in rewards)


def _largest_micro_batch(terms: MemoryTerms, plans: Sequence[DevicePlan]) -> int:
    """The largest micro-batch that fits, in tokens, on the device with the least memory left for each rank."""
    rooms = []
    for plan in plans:
        others = [
            part.asleep_bytes if plan.turns else part.largest.size_bytes
            for part in plan.functions
            if not part.publishes
        ]
        if ranks := [part for part in plan.functions if part.publishes]:
            rooms.append((plan.usable_bytes - sum(others)) // len(ranks) - ranks[0].asleep_bytes)
    low, high = 0, MOST_TOKENS if rooms else 0
    while low < high:
        middle = (low + high + 1) // 2
        needed = max(phase.size_bytes for phase in learner_phases(terms, middle))
        low, high = (middle, high) if needed <= min(rooms) else (low, middle - 1)
    return low


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


TENSOR_PARALLEL_SIZES = (2, 4, 8)
"""Sizes that vLLM's kernels and most models' numbers of heads take, inside one machine."""

FRACTIONS = (0.6, 0.45, 0.3)
"""The fractions of a GPU for an engine that shares it."""


def more_ranks(devices: int, ranks: int = 0) -> Iterator[int]:
    """Numbers of learner ranks above `ranks` that `devices` can hold: powers of two, and one on each device."""
    powers = [2**power for power in range(devices.bit_length()) if ranks < 2**power < devices]
    yield from powers
    if devices > ranks:
        yield devices


@dataclass(frozen=True, slots=True)
class Question:
    """Which run is to fit on which devices."""

    spec: RunSpec
    shape: ModelShape
    sheet: DeviceSheet
    count: int
    sequence_tokens: int
    host_bytes: int
    rewards: Rewards = ()
    """The reward models whose sizes are known."""
    draft: ModelShape | None = None
    """The sizes of a draft model."""
    given: RunSpec | None = None
    """The spec before `spec` was placed: what its user has left open is open there."""

    @property
    def learner_sheet(self) -> DeviceSheet:
        """The devices of the learner's side."""
        return learner_sheet(self.spec, self.sheet)

    @property
    def learner_count(self) -> int:
        """Devices of the learner's side."""
        placement = self.spec.placement
        return placement.learner_devices if placement.mode == "disaggregated" else self.count

    @property
    def devices(self) -> Mapping[str, int]:
        """The numbers of its devices, by kind."""
        own = self.spec.placement.learner_kind
        return {self.sheet.kind: self.count} | ({} if own is None else {own: self.learner_count})

    def with_schedule(self, schedule: ScheduleSpec) -> Question:
        """The same run with another schedule."""
        return replace(self, spec=self.spec.model_copy(update={"schedule": schedule}), given=None)

    def plan(self) -> MemoryPlan:
        """Raises PlacementError if there are too few devices."""
        return memory_plan(
            self.spec,
            self.shape,
            self.sheet,
            self.count,
            self.sequence_tokens,
            self.host_bytes,
            self.rewards,
            self.draft,
        )


def edited(spec: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """The spec with other values, by dotted key. Keys count as set by the user if they did before."""
    for key, value in values.items():
        spec = _edited(spec, key.split("."), value)
    return spec


def _edited(model: Any, path: Sequence[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _edited(getattr(model, path[0]), path[1:], value)
    return model.model_copy(update={path[0]: inner})
