"""What a run holds on every device, and whether it fits. Pure: a spec, a model's sizes and a kind of device in.

Functions on one device do not take turns in its memory: an engine keeps its share, and torch keeps what it has had.
So a device must hold the largest phase of each of them at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfless.prepare.memory.formulas import (
    CACHED_VERSIONS,
    GIB,
    PROCESS_BYTES,
    STORED_VERSIONS,
    Part,
    Phase,
    Scored,
    Sharded,
    engine_parts,
    kv_token_bytes,
    learn_phases,
    reference_phase,
    score_phase,
    version_bytes,
)
from rlhfless.records import FunctionName
from rlhfless.scaling.latency.devices import DeviceSheet
from rlhfless.scaling.latency.shape import DTYPE_BYTES, ModelShape
from rlhfless.scaling.placement import (
    CPU_KIND,
    NODE_DEVICES,
    Node,
    Placement,
    PlacementError,
    place_run,
    ranks_of,
)
from rlhfless.spec import RewardModelSpec, RunSpec

Rewards = Sequence[tuple[RewardModelSpec, ModelShape]]
"""The reward models of a run whose sizes are known."""

LOGITS_CHUNK_ELEMENTS = 2**25
"""Where nothing is said: as in rlhfless.functions.head, which imports torch; a test compares the two."""

DEFAULT_CPU_KV_GIB = 1.0
"""As in rlhfless.functions.generation.vllm.arguments; a test compares the two."""

MOST_TOKENS = 2**24
"""Of a micro-batch whose size is looked for: more than any step has."""

HOST_CORES = 64
"""Cores of a GPU machine, for placements that are only planned: more than scoring takes."""


@dataclass(frozen=True, slots=True)
class FunctionPlan:
    """A replica or rank of a function on one device: its phases, of which the largest counts."""

    function: FunctionName
    phases: tuple[Phase, ...]

    @property
    def largest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.size_bytes)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One device, or several that hold the same."""

    count: int
    kind: str
    memory_bytes: int
    functions: tuple[FunctionPlan, ...]

    @property
    def size_bytes(self) -> int:
        """What is held at most."""
        return sum(part.largest.size_bytes for part in self.functions)

    @property
    def fits(self) -> bool:
        return self.size_bytes <= self.memory_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A run on so many devices of a kind."""

    devices: tuple[DevicePlan, ...]
    kv_tokens: int
    """Tokens that the KV cache of one actor holds."""
    sequence_tokens: int
    """The longest sequence."""
    micro_batch_tokens: int
    """The largest micro-batch that fits beside what else is on the learner's devices; 0 if none does."""
    host_bytes: int
    """Of host memory, over all nodes: ranks load their shards in float32 before they move them, or keep them there with
    gradients and optimiser; on CPU cores all that the functions hold."""
    shared_bytes: int
    """Of shared memory on the learner's node: the store of weights."""
    cache_bytes: int
    """Of shared memory on each other node: its cache of the store."""
    checkpoint_bytes: int
    """Of host memory, over the learner's nodes, while a checkpoint is written in the background: a copy of master
    weights and moments. Where it is not free the run waits for the checkpoint."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What does not fit; empty if all does."""
        found = [
            f"{device.kind}: {_gib(device.size_bytes)} are needed and {_gib(device.memory_bytes)} are there ("
            + ", ".join(
                f"{part.function} {_gib(part.largest.size_bytes)} in {part.largest.name}" for part in device.functions
            )
            + ")"
            for device in self.devices
            if not device.fits
        ]
        if self.kv_tokens < self.sequence_tokens:
            found.append(
                f"generation: room for {max(self.kv_tokens, 0):,} tokens of KV on an actor, and one sequence may have "
                f"{self.sequence_tokens:,}"
            )
        return tuple(found)

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
) -> MemoryPlan:
    """The plan of a run on `count` devices of a kind, whose sequences have at most `sequence_tokens`.

    `host_bytes`: memory of one machine, which is the devices' own on CPU cores. `rewards`: sizes of the reward models
    that are known. Raises PlacementError if there are too few devices.
    """
    memory = host_bytes if sheet.kind == CPU_KIND else int(sheet.memory_bytes.value)
    alike = Counter(tuple(sorted(here)) for here in _functions_by_device(spec, sheet.kind, count).values())
    plans = []
    for functions, times in sorted(alike.items()):
        parts = [
            FunctionPlan(each, phases_of(spec, shape, sheet, each, sequence_tokens, rewards)) for each in functions
        ]
        plans.append(DevicePlan(times, sheet.kind, memory, tuple(parts)))
    store = version_bytes(shape, spec.model.dtype)
    states = (16 if spec.learner.offload else 4) * shape.parameters * spec.learner.copies
    held = states + _frozen_bytes(spec, shape, rewards)
    if sheet.kind == CPU_KIND:
        held = sum(plan.count * plan.size_bytes for plan in plans) + (states if spec.learner.offload else 0)
    return MemoryPlan(
        devices=_as_one(plans) if sheet.kind == CPU_KIND else tuple(plans),
        kv_tokens=_kv_tokens(spec, shape, sheet),
        sequence_tokens=sequence_tokens,
        micro_batch_tokens=_largest_micro_batch(spec, shape, plans, memory),
        host_bytes=held,
        shared_bytes=STORED_VERSIONS * store,
        cache_bytes=CACHED_VERSIONS * store,
        checkpoint_bytes=12 * shape.parameters * spec.learner.copies if spec.checkpoint.background else 0,
    )


def _as_one(plans: Sequence[DevicePlan]) -> tuple[DevicePlan, ...]:
    """The cores of a machine, which share its memory."""
    functions = tuple(part for plan in plans for part in plan.functions for _ in range(plan.count))
    return (DevicePlan(1, CPU_KIND, plans[0].memory_bytes, functions),) if plans else ()


def learner_nodes(spec: RunSpec, kind: str, count: int) -> tuple[int, ...]:
    """The learner's devices on each node that it has some on; none if there are too few."""
    try:
        placement = _placement(spec, kind, count)
    except PlacementError:
        return ()
    return tuple(len(group.devices) for group in placement.groups_of(placement.allocation(FunctionName.LEARNER, 0)))


def _placement(spec: RunSpec, kind: str, count: int) -> Placement:
    asked = spec.placement.model_copy(update={"kind": kind, "devices": count})
    return place_run(spec.model_copy(update={"placement": asked}), _nodes(kind, count))


def _functions_by_device(spec: RunSpec, kind: str, count: int) -> Mapping[str, list[FunctionName]]:
    """By device: the functions of the replicas and ranks that are on it."""
    placement = _placement(spec, kind, count)
    ranks = ranks_of(spec)
    found: defaultdict[str, list[FunctionName]] = defaultdict(list)
    for function, allocations in placement.allocations.items():
        if function is FunctionName.SCORING:
            continue  # CPU work
        for allocation in allocations:
            devices = allocation.devices
            if function in ranks:
                devices = tuple(devices[rank % len(devices)] for rank in range(ranks[function]))
            for device in devices:
                found[device.name].append(function)
    return found


def _nodes(kind: str, count: int) -> list[Node]:
    """Machines with so many devices: one with all CPU cores, or as many of eight GPUs as it takes."""
    if kind == CPU_KIND:
        return [Node("0", "", count, count)]
    sizes = [min(NODE_DEVICES, count - first) for first in range(0, count, NODE_DEVICES)]
    return [Node(str(i), "", HOST_CORES, HOST_CORES, kind, size, size) for i, size in enumerate(sizes)]


def phases_of(
    spec: RunSpec,
    shape: ModelShape,
    sheet: DeviceSheet,
    function: FunctionName,
    sequence_tokens: int,
    rewards: Rewards = (),
) -> tuple[Phase, ...]:
    """The phases of one replica or rank of a function on one device."""
    on_gpu = sheet.kind != CPU_KIND
    process = Part("process", PROCESS_BYTES if on_gpu else 0)
    tokens = max(spec.learner.micro_batch_tokens, sequence_tokens)
    if function is FunctionName.GENERATION:
        return (_generation(spec, shape, sheet),)
    if function is FunctionName.LEARNER:
        phases = _learner_phases(spec, shape, tokens)
    elif function is FunctionName.REFERENCE:
        sharing, ranks = spec.learner.share_prefixes, ranks_of(spec)[function]
        dtype = spec.learner.dtype
        chunk = spec.learner.logits_elements or LOGITS_CHUNK_ELEMENTS
        phases = (reference_phase(shape, tokens, dtype, chunk, sharing=sharing, ranks=ranks),)
    else:
        phases = (score_phase([_scored(part, of) for part, of in rewards], ranks_of(spec)[function]),)
    return tuple(Phase(phase.name, (*phase.parts, process)) for phase in phases)


def _scored(part: RewardModelSpec, shape: ModelShape) -> Scored:
    return Scored(shape, max(part.micro_batch_tokens, part.max_tokens), part.dtype)


def _frozen_bytes(spec: RunSpec, shape: ModelShape, rewards: Rewards) -> int:
    """Of the host, while reference and reward models are loaded: each in its own format."""
    reference = DTYPE_BYTES[spec.learner.dtype] * shape.parameters if spec.algorithm.needs.reference else 0
    return reference + sum(DTYPE_BYTES[part.dtype] * of.parameters for part, of in rewards)


def _generation(spec: RunSpec, shape: ModelShape, sheet: DeviceSheet) -> Phase:
    """On a GPU an engine takes its fraction, and gives KV what its parts leave of it."""
    parts, kv = _engine(spec, shape, sheet)
    return Phase("generate", (*parts, Part("KV", max(kv, 0))))


def _engine(spec: RunSpec, shape: ModelShape, sheet: DeviceSheet) -> tuple[tuple[Part, ...], int]:
    """The parts of one device of an engine, and the bytes of its KV, which are negative if the parts do not fit."""
    engine, on_gpu = spec.generation.engine, sheet.kind != CPU_KIND
    parts = engine_parts(
        shape,
        spec.model.dtype,
        engine.tensor_parallel_size,
        engine.max_batch_tokens,
        engine.max_sequences,
        graphs=on_gpu and not engine.eager,
    )
    if not on_gpu:
        return parts, int((engine.kv_cache_gib or DEFAULT_CPU_KV_GIB) * GIB)
    parts = (*parts, Part("process", PROCESS_BYTES))
    budget = int(engine.gpu_memory_fraction * sheet.memory_bytes.value)
    return parts, budget - sum(part.size_bytes for part in parts)


def kv_bytes(spec: RunSpec, shape: ModelShape, sheet: DeviceSheet) -> int:
    """Of the KV cache on each device of an engine."""
    return _engine(spec, shape, sheet)[1]


def _kv_tokens(spec: RunSpec, shape: ModelShape, sheet: DeviceSheet) -> int:
    per_token = kv_token_bytes(shape, spec.model.dtype, spec.generation.engine.tensor_parallel_size)
    return kv_bytes(spec, shape, sheet) // per_token


def _learner_phases(spec: RunSpec, shape: ModelShape, tokens: int) -> tuple[Phase, ...]:
    learner = spec.learner
    how = Sharded(
        learner.split_over(learner.world_size),
        learner.dtype,
        learner.gradient_checkpointing,
        learner.offload,
        learner.head_dtype == "float32",
        learner.share_prefixes,
        learner.copies,
    )
    return learn_phases(shape, tokens, how, learner.logits_elements or LOGITS_CHUNK_ELEMENTS)


def _largest_micro_batch(spec: RunSpec, shape: ModelShape, plans: Sequence[DevicePlan], memory: int) -> int:
    """By bisection over tokens, on the device with the least left for each rank."""
    rooms = []
    for plan in plans:
        others = [part.largest.size_bytes for part in plan.functions if part.function is not FunctionName.LEARNER]
        if ranks := len(plan.functions) - len(others):
            rooms.append((memory - sum(others)) // ranks - PROCESS_BYTES * (plan.kind != CPU_KIND))
    low, high = 0, MOST_TOKENS if rooms else 0
    while low < high:
        middle = (low + high + 1) // 2
        needed = max(phase.size_bytes for phase in _learner_phases(spec, shape, middle))
        low, high = (middle, high) if needed <= min(rooms) else (low, middle - 1)
    return low


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
