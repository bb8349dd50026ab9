"""The memory plan of a run: the memory held on every device, and whether it fits. Pure: computed from a spec, a model's
sizes and a kind of device.

An engine keeps its share of a device, and torch keeps memory once reserved. A device must therefore hold the largest
phase of each of its functions at once. If functions take turns (`placement.turns`), it must hold the largest single
phase, plus the memory that each other function's process keeps.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhfless.functions.kinds import kv_tokens, learner_phases
from rlhfless.scaling.function_specs import (
    NO_SHAPES,
    FrozenShapes,
    MemoryTerms,
    Rewards,
    kinds_of,
    place_run,
    replica_requests,
)
from rlhfless.scaling.latency.devices import DeviceSheet, device_of
from rlhfless.scaling.latency.shape import DTYPE_BYTES, ModelShape
from rlhfless.scaling.memory import (
    CACHED_VERSIONS,
    GIB,
    STAYS,
    FrozenBase,
    MemoryPhase,
    kept_bytes,
    published_bytes,
    stored_versions,
    without_head,
)
from rlhfless.scaling.placement import CPU_KIND, NODE_DEVICES, Device, Node, Placement, PlacementError, Site
from rlhfless.spec import RunSpec, ScheduleSpec

MOST_TOKENS = 2**24
"""Upper bound of the search for the largest micro-batch: more than any step has."""

HOST_CORES = 64
"""Cores assumed for a GPU machine in hypothetical placements: more than scoring needs."""


@dataclass(frozen=True, slots=True)
class FunctionPlan:
    """A replica or rank of a function on one device. The largest of its phases counts."""

    function: str
    phases: tuple[MemoryPhase, ...]
    publishes: bool = False
    """See FunctionSpec."""

    @property
    def largest(self) -> MemoryPhase:
        return max(self.phases, key=lambda phase: phase.size_bytes)

    @property
    def asleep_bytes(self) -> int:
        """Return the bytes that stay on the device while the function sleeps."""
        return sum(part.size_bytes for part in self.largest.parts if part.name in STAYS)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One device, or several with the same contents."""

    count: int
    kind: str
    memory_bytes: int
    functions: tuple[FunctionPlan, ...]
    turns: bool = False
    """Whether its functions take turns."""
    guests: int = 0
    """Number of other runs that sleep on it, each with the same size as this one."""

    @property
    def size_bytes(self) -> int:
        """Return the maximum memory held at a time."""
        held = [part.largest.size_bytes for part in self.functions]
        if not self.turns:
            return sum(held)
        asleep = [part.asleep_bytes for part in self.functions]
        return (1 + self.guests) * sum(asleep) + max(map(int.__sub__, held, asleep), default=0)

    @property
    def usable_bytes(self) -> int:
        """Return the bytes that a plan may fill."""
        return self.memory_bytes if self.kind == CPU_KIND else device_of(self.kind).usable_bytes

    @property
    def fits(self) -> bool:
        return self.size_bytes <= self.usable_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a run on devices of a kind."""

    devices: tuple[DevicePlan, ...]
    kv_tokens: int | None
    """Tokens that one actor's KV cache holds in sequences of `sequence_tokens`; None without actors."""
    sequence_tokens: int
    """Length of the longest sequence."""
    micro_batch_tokens: int
    """Largest micro-batch that fits into the memory left on the learner's devices; 0 if none does."""
    host_bytes: int
    """Host memory required over all nodes. Ranks load their shards in float32 before moving them to the device, or keep
    them on the host with gradients and optimiser. On CPU cores it is the memory of all functions."""
    shared_bytes: int
    """Shared memory required on the learner's node for the store of weights."""
    cache_bytes: int
    """Shared memory required on each other node for its cache of the store."""
    checkpoint_bytes: int
    """Host memory required over the nodes of learner and critic while a checkpoint is written in the background: a copy
    of master weights and moments. If it is not free, the run waits for the checkpoint."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Return descriptions of everything that does not fit; empty if the run fits."""
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
    frozen: FrozenShapes = NO_SHAPES,
    draft: ModelShape | None = None,
) -> MemoryPlan:
    """Return the plan of a run on `count` devices of a kind, plus those of its `placement.learner_kind`.

    Sequences have up to `sequence_tokens`. `host_bytes` is the memory of one machine; on CPU cores it is the devices'
    own. `rewards` are the known sizes of reward models, `frozen` those of teachers and judges, `draft` those of a draft
    model. Raises PlacementError if there are too few devices.
    """
    of_learner = learner_sheet(spec, sheet)
    memory = {
        each.kind: host_bytes if each.kind == CPU_KIND else int(each.memory_bytes.value) for each in (sheet, of_learner)
    }
    windows = MemoryTerms(spec, shape, sheet, sequence_tokens, rewards, frozen, draft)
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
    store = published_bytes(shape, spec)
    headless = {"critic", "learner"} if spec.type == "reward_model" else {"critic"}
    sizes = {name: (without_head(shape) if name in headless else shape).parameters for name in spec.trained}
    weights = {name: 4 * sizes[name] * part.copies for name, part in spec.trained.items()}
    # Memory copied by a checkpoint, and kept on the host during turns: master weights, moments, moving average.
    trained = dict(weights)
    if (base := FrozenBase.of(shape, spec.model)) is not None:
        trained["learner"] = 4 * base.parameters
    kept = {
        name: kept_bytes(size, averaged=spec.trained[name].average_decay is not None) for name, size in trained.items()
    }
    offloaded = sum(weights[name] + kept[name] for name, part in spec.trained.items() if part.offload)
    # All are loaded through the host. A frozen base waits there as well.
    waiting = {name: max(kept[name], weights[name]) if spec.placement.in_turns else weights[name] for name in weights}
    on_devices = sum(waiting[name] for name, part in spec.trained.items() if not part.offload)
    loaded = on_devices + _frozen_bytes(windows)
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
    """Return the sheet of the learner side's devices; `sheet` is that of generation. Raises UnknownDevice."""
    return sheet if spec.placement.learner_kind is None else device_of(spec.placement.learner_kind)


def _as_one(plans: Sequence[DevicePlan]) -> tuple[DevicePlan, ...]:
    """Merge the cores of a machine, which share its memory."""
    if len(plans) == 1 and plans[0].count == 1:
        return (plans[0],)
    functions = tuple(part for plan in plans for part in plan.functions for _ in range(plan.count))
    # Several cores take turns independently, but share this memory: to be safe, counted as without turns.
    return (DevicePlan(1, CPU_KIND, plans[0].memory_bytes, functions),) if plans else ()


def held_devices(spec: RunSpec, kind: str, count: int) -> dict[str, float]:
    """Return the number of devices of each function, counting shared devices by share. Raises PlacementError."""
    allocations = _placement(spec, kind, count).allocations
    return {function: math.fsum(share for each in of for share in each.shares) for function, of in allocations.items()}


def nodes_of(spec: RunSpec, function: str, kind: str, count: int) -> tuple[int, ...]:
    """Return the number of a function's devices on each of its nodes; empty if there are too few devices."""
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
    """Return the functions among `names` on each device, once for each replica or rank."""
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
    """Return machines with `count` devices: one with all CPU cores, or GPU machines of up to eight devices.

    Their names are numbered from `first`.
    """
    if kind == CPU_KIND:
        return [Node(str(first), "", count, count)]
    sizes = [min(NODE_DEVICES, count - taken) for taken in range(0, count, NODE_DEVICES)]
    return [Node(str(first + i), "", HOST_CORES, HOST_CORES, kind, size, size) for i, size in enumerate(sizes)]


def _frozen_bytes(terms: MemoryTerms) -> int:
    """Return the host bytes of reference, teachers and reward models as they load, and of judges that sleep there."""
    spec, number = terms.spec, DTYPE_BYTES[terms.spec.learner.dtype]
    frozen = [terms.shape] * (spec.needs_reference and not spec.learner_is_reference)
    frozen += [terms.frozen.get(each.function, terms.shape) for each in spec.teachers if each.path is not None]
    rewards = sum(DTYPE_BYTES[part.dtype] * of.parameters for part, of in terms.rewards)
    judges = spec.judges if spec.placement.in_turns else ()
    shapes = ((each.dtype, terms.frozen.get(each.function, terms.shape)) for each in judges)
    rewards += sum(DTYPE_BYTES[dtype] * shape.parameters for dtype, shape in shapes)
    return rewards + number * sum(shape.parameters for shape in frozen)


def _largest_micro_batch(terms: MemoryTerms, plans: Sequence[DevicePlan]) -> int:
    """Return the largest micro-batch in tokens that fits on the device with the least memory left per rank."""
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
"""Sizes supported by vLLM's kernels and divisible into most models' heads, within one machine."""

FRACTIONS = (0.6, 0.45, 0.3)
"""Fractions of a GPU for an engine that shares it."""


def more_ranks(devices: int, ranks: int = 0) -> Iterator[int]:
    """Yield numbers of learner ranks above `ranks` that fit on `devices`: powers of two, and one per device."""
    powers = [2**power for power in range(devices.bit_length()) if ranks < 2**power < devices]
    yield from powers
    if devices > ranks:
        yield devices


@dataclass(frozen=True, slots=True)
class Question:
    """A run and the devices that it should fit on."""

    spec: RunSpec
    shape: ModelShape
    sheet: DeviceSheet
    count: int
    sequence_tokens: int
    host_bytes: int
    rewards: Rewards = ()
    """The reward models of known size."""
    frozen: FrozenShapes = field(default_factory=dict)
    draft: ModelShape | None = None
    """The sizes of a draft model."""
    given: RunSpec | None = None
    """The spec before `spec` was placed, with the keys that the user left open."""

    @property
    def learner_sheet(self) -> DeviceSheet:
        """Return the sheet of the learner side's devices."""
        return learner_sheet(self.spec, self.sheet)

    @property
    def learner_count(self) -> int:
        """Return the number of devices on the learner side."""
        placement = self.spec.placement
        return placement.learner_devices if placement.mode == "disaggregated" else self.count

    @property
    def devices(self) -> Mapping[str, int]:
        """Return the numbers of its devices, by kind."""
        own = self.spec.placement.learner_kind
        return {self.sheet.kind: self.count} | ({} if own is None else {own: self.learner_count})

    def with_schedule(self, schedule: ScheduleSpec) -> Question:
        """Return the same run with another schedule."""
        return replace(self, spec=self.spec.model_copy(update={"schedule": schedule}), given=None)

    def plan(self) -> MemoryPlan:
        """Return its memory plan. Raises PlacementError if there are too few devices."""
        return memory_plan(
            self.spec,
            self.shape,
            self.sheet,
            self.count,
            self.sequence_tokens,
            self.host_bytes,
            self.rewards,
            self.frozen,
            self.draft,
        )


def edited(spec: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """Return the spec with other values, by dotted key. Whether a key counts as set by the user is unchanged."""
    for key, value in values.items():
        spec = _edited(spec, key.split("."), value)
    return spec


def _edited(model: Any, path: Sequence[str], value: Any) -> Any:
    name = path[0]
    of = model[int(name)] if isinstance(model, tuple) else getattr(model, name)
    inner = value if len(path) == 1 else _edited(of, path[1:], value)
    if isinstance(model, tuple):
        return (*model[: int(name)], inner, *model[int(name) + 1 :])
    return model.model_copy(update={name: inner})


def is_set(spec: RunSpec, key: str) -> bool:
    """Return whether the user set a dotted key."""
    section: Any = spec
    for name in key.split("."):
        if isinstance(section, tuple):
            section = section[int(name)]
        elif name not in section.model_fields_set:
            return False
        else:
            section = getattr(section, name)
    return True
