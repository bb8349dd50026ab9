"""The smallest change of a spec, or of its devices, with which a run fits. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhfless.prepare.memory.plan import MemoryPlan, learner_sheet, memory_plan
from rlhfless.scaling.function_kinds import Rewards, wanted_of
from rlhfless.scaling.latency.devices import DeviceSheet, load_devices
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.placement import CPU_KIND, PlacementError, Site
from rlhfless.spec import RunSpec, ScheduleSpec
from rlhfless.spec.run import OPTIMIZER_KEYS

TENSOR_PARALLEL = (2, 4, 8)
"""Sizes that vLLM's kernels and most models' numbers of heads take, inside one machine."""

FRACTIONS = (0.6, 0.45, 0.3)
"""The fractions of a GPU for an engine that shares it."""

MOST_DEVICES = 64


@dataclass(frozen=True, slots=True)
class Change:
    """A change, and the plan after it."""

    text: str
    """The keys of the spec, or the devices, that change."""
    plan: MemoryPlan


def more_ranks(devices: int, ranks: int = 0) -> Iterator[int]:
    """Numbers of learner ranks above `ranks` that `devices` can hold: powers of two, and one on each device."""
    powers = [2**power for power in range(devices.bit_length()) if ranks < 2**power < devices]
    yield from powers
    if devices > ranks:
        yield devices


Edit = tuple[str, Mapping[str, Any], str | None, int | None]
"""(text, values by dotted key, another kind of device, another number of devices)."""


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
        return replace(self, spec=self.spec.model_copy(update={"schedule": schedule}))

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


def nearest_change(asked: Question) -> Change | None:
    """One change, or else two, after which the run fits; None if no two suffice. Changes that cost nothing come first,
    then those that cost time, then those that cost money."""
    edits = [*_of_trained(asked), *_of_placement(asked), *_of_devices(asked)]
    pairs = sorted(itertools.combinations(range(len(edits)), 2), key=lambda pair: (sum(pair), pair))
    for chosen in [(index,) for index in range(len(edits))] + pairs:
        change = _after(asked, [edits[index] for index in chosen])
        if change is not None and change.plan.fits:
            return change
    return None


def _of_trained(asked: Question) -> Iterator[Edit]:
    spec, on_gpu = asked.spec, asked.learner_sheet.kind != CPU_KIND
    if asked.sheet.kind != CPU_KIND and spec.model.dtype == "float32":
        yield "model.dtype: bfloat16", {"model.dtype": "bfloat16"}, None, None
    for name, part in spec.trained.items():
        if on_gpu and part.dtype == "float32":
            yield f"{name}.dtype: bfloat16", {f"{name}.dtype": "bfloat16"}, None, None
        if not part.gradient_checkpointing:
            yield f"{name}.gradient_checkpointing: true", {f"{name}.gradient_checkpointing": True}, None, None
        if on_gpu and part.copies > 1:
            yield f"{name}.shard_ranks: auto", {f"{name}.shard_ranks": "auto"}, None, None
        tokens = part.micro_batch_tokens // 2
        while tokens >= max(asked.sequence_tokens, 256):
            yield f"{name}.micro_batch_tokens: {tokens}", {f"{name}.micro_batch_tokens": tokens}, None, None
            tokens //= 2


def _of_placement(asked: Question) -> Iterator[Edit]:
    if asked.learner_sheet.kind == CPU_KIND:
        return
    spec, colocated = asked.spec, asked.spec.placement.mode == "colocated"
    engines = not spec.supervised
    for fraction in FRACTIONS if colocated and engines else ():
        key = "generation.engine.gpu_memory_fraction"
        if fraction < spec.generation.engine.gpu_memory_fraction:
            yield f"{key}: {fraction}", {key: fraction}, None, None
    if colocated and engines and asked.count > 1:
        ranks = max(1, min(spec.learner.world_size, asked.count // 2))
        split = {"placement.mode": "disaggregated", "placement.learner_devices": ranks}
        yield f"placement: {{mode: disaggregated, learner_devices: {ranks}}}", split, None, None
    most = asked.count if colocated else asked.count - 1 if spec.placement.learner_kind is None else MOST_DEVICES
    for ranks in more_ranks(most, spec.learner.world_size):
        shared: dict[str, Any] = {"learner.ranks": ranks}
        text = f"learner.ranks: {ranks}"
        if not colocated:
            shared |= {"placement.learner_devices": ranks}
            text += f" and placement.learner_devices: {ranks}"
        yield text, shared, None, None
    yield from _of_frozen(spec, asked.count if colocated else spec.placement.learner_devices)
    yield from _of_moments(spec)
    yield from _of_memory(spec)


def _of_memory(spec: RunSpec) -> Iterator[Edit]:
    """Changes that cost time in each step: engines over more devices, turns, the learner's states in the host's
    memory."""
    for size in () if spec.supervised else TENSOR_PARALLEL:
        if size > spec.generation.engine.tensor_parallel_size:
            key = "generation.engine.tensor_parallel_size"
            yield f"{key}: {size}", {key: size}, None, None
    offload = ((f"{name}.offload", part.offload) for name, part in spec.trained.items())
    turns = spec.placement.in_turns or spec.generation.speculation.has_weights  # which turns would lose
    for key, is_on in (("placement.turns", turns), *offload):
        if not is_on:
            yield f"{key}: true", {key: True}, None, None


def _of_moments(spec: RunSpec) -> Iterator[Edit]:
    """Optimiser moments in 8 bits: no time, and rounding."""
    for name, optimizer in spec.optimizers.items():
        if optimizer.moment_bits == 32:
            key = f"{OPTIMIZER_KEYS[name]}.moment_bits"
            yield f"{key}: 8", {key: 8}, None, None


def _of_frozen(spec: RunSpec, devices: int) -> Iterator[Edit]:
    """More ranks for the reference and for reward models, on `devices` of the learner's side."""
    for wanted in wanted_of(spec):
        for more in more_ranks(devices, wanted.ranks) if wanted.site is Site.BESIDE and wanted.ranks_key else ():
            yield f"{wanted.ranks_key}: {more}", {wanted.ranks_key: more}, None, None


def _of_devices(asked: Question) -> Iterator[Edit]:
    if asked.sheet.kind == CPU_KIND:
        return
    count = asked.count * 2
    while count <= MOST_DEVICES:
        yield f"{count} x {asked.sheet.kind}", {}, None, count
        count *= 2
    for sheet in _larger(asked.sheet):
        yield f"{asked.count} x {sheet.kind}", {}, sheet.kind, None
    for sheet in _larger(asked.learner_sheet) if asked.spec.placement.learner_kind is not None else ():
        yield f"placement.learner_kind: {sheet.kind}", {"placement.learner_kind": sheet.kind}, None, None


def _larger(than: DeviceSheet) -> list[DeviceSheet]:
    """Devices with more memory, the smallest first."""
    larger = [sheet for sheet in load_devices().values() if sheet.memory_bytes.value > than.memory_bytes.value]
    usable = (sheet for sheet in larger if sheet.kind != CPU_KIND and sheet.no_engine is None)
    return sorted(usable, key=lambda sheet: sheet.memory_bytes.value)


def _after(asked: Question, edits: Sequence[Edit]) -> Change | None:
    """The run after some changes; None if they exclude each other."""
    values: dict[str, Any] = {}
    sheet, count = asked.sheet, asked.count
    for _, sets, kind, number in edits:
        if values.keys() & sets.keys():
            return None
        values |= sets
        sheet = load_devices()[kind] if kind else sheet
        count = number or count
    if sheet is not asked.sheet and count != asked.count:
        return None
    spec = edited(asked.spec, values)
    try:
        plan = replace(asked, spec=spec, sheet=sheet, count=count).plan()
    except PlacementError:
        return None
    return Change(" and ".join(text for text, *_ in edits), plan)


def edited(spec: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """The spec with other values, by dotted key. Keys count as set by the user if they did before."""
    for key, value in values.items():
        spec = _edited(spec, key.split("."), value)
    return spec


def _edited(model: Any, path: Sequence[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _edited(getattr(model, path[0]), path[1:], value)
    return model.model_copy(update={path[0]: inner})
