"""Which run is to fit on which devices, and edits of its spec. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhfless.planning.memory_plan import MemoryPlan, learner_sheet, memory_plan
from rlhfless.scaling.function_specs import Rewards
from rlhfless.scaling.latency.devices import DeviceSheet
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.spec import RunSpec, ScheduleSpec

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
