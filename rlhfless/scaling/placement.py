"""Which devices each function may hold, and how much of them. Pure.

A device is a GPU or a CPU core of one node. Co-located functions take turns on a device, so each holds an equal share
of it: its memory is occupied and no other function can have that share. Shares of a device add up to at most 1, which
Ray enforces (a custom resource per device) and which makes the bill of a run at most devices x price x time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhfless.records import FunctionName
from rlhfless.spec import PlacementSpec, RunSpec


@dataclass(frozen=True, slots=True)
class Device:
    """One device of one node."""

    name: str
    """Such as `cpu-0`; also the name of the Ray resource, with a prefix."""
    kind: str
    """Key of the price book, such as `cpu-core` or `h100`."""
    index: int
    """Number of the core or GPU on its node."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Room for one replica: its devices, and the share it holds of each."""

    devices: tuple[Device, ...]
    shares: tuple[float, ...]
    """Of each device, 0 to 1 `[device]`."""

    @classmethod
    def of(cls, devices: Sequence[Device], share: float = 1.0) -> Allocation:
        """An equal share of each device."""
        return cls(tuple(devices), (share,) * len(devices))

    @property
    def shared(self) -> Iterator[tuple[Device, float]]:
        """Each device with the share of it."""
        return zip(self.devices, self.shares, strict=True)


@dataclass(frozen=True, slots=True)
class Placement:
    """An allocation for every replica that a run may start."""

    allocations: Mapping[FunctionName, tuple[Allocation, ...]]

    def allocation(self, function: FunctionName, index: int) -> Allocation:
        """The allocation of a function's replica number `index`."""
        return self.allocations[function][index]


class PlacementError(ValueError):
    """The devices do not suffice; the text says what for and how many are there."""


def helpers(spec: RunSpec) -> list[FunctionName]:
    """The functions with one replica that a run has beside generation and learner."""
    wanted = {
        FunctionName.SCORING: True,
        FunctionName.REWARD_MODEL: bool(spec.reward_models),
        FunctionName.REFERENCE: spec.algorithm.needs.reference,
    }
    return [function for function, needed in wanted.items() if needed]


def place(
    spec: PlacementSpec,
    devices: Sequence[Device],
    *,
    generation_actors: int,
    devices_per_actor: int,
    learner_ranks: int,
    functions: Sequence[FunctionName],
) -> Placement:
    """Give every replica its allocation.

    Co-located: actor i has devices i*k .. i*k+k-1, wrapping around if there are more actors than devices; the learner
    has all devices; the single replicas of the other functions sit on the last device, then the one before.
    Disaggregated: the last `learner_devices` devices belong to the learner side, the others to generation.

    Raises PlacementError if a side has no device or an actor needs more devices than its side has.
    """
    devices = devices[: spec.devices or len(devices)]
    if len(devices) < (spec.devices or 1):
        raise PlacementError(f"placement.devices asks for {spec.devices} device(s), but {len(devices)} are there")
    generation, learning = _sides(spec, devices)
    if devices_per_actor > len(generation):
        raise PlacementError(
            f"generation.engine.tensor_parallel_size is {devices_per_actor}, but generation has {len(generation)} "
            "device(s); lower it, or raise placement.devices"
        )
    chosen: dict[FunctionName, list[tuple[Device, ...]]] = {
        FunctionName.GENERATION: [
            tuple(generation[(i * devices_per_actor + j) % len(generation)] for j in range(devices_per_actor))
            for i in range(generation_actors)
        ],
        FunctionName.LEARNER: [tuple(learning)],
    }
    others = [f for f in functions if f not in chosen]
    for offset, function in enumerate(others):
        chosen[function] = [(learning[-1 - offset % len(learning)],)]
    if learner_ranks > len(learning) and learning[0].kind != CPU_KIND:
        raise PlacementError(f"learner.ranks is {learner_ranks}, but the learner has {len(learning)} device(s)")
    return Placement(_with_shares(chosen))


CPU_KIND = "cpu-core"
"""Device kind of a CPU core in the price book."""


def _sides(spec: PlacementSpec, devices: Sequence[Device]) -> tuple[Sequence[Device], Sequence[Device]]:
    if spec.mode == "colocated":
        return devices, devices
    if len(devices) <= spec.learner_devices:
        raise PlacementError(
            f"placement.learner_devices is {spec.learner_devices} and the run has {len(devices)} device(s), which "
            "leaves none for generation; use mode colocated, or more devices"
        )
    return devices[: -spec.learner_devices], devices[-spec.learner_devices :]


def _with_shares(
    chosen: Mapping[FunctionName, Sequence[tuple[Device, ...]]],
) -> dict[FunctionName, tuple[Allocation, ...]]:
    """Of each device its replicas have equal shares, which add up to 1."""
    crowd = Counter(device for allocations in chosen.values() for devices in allocations for device in devices)
    return {
        function: tuple(
            Allocation(devices, tuple(1.0 / crowd[device] for device in devices)) for devices in allocations
        )
        for function, allocations in chosen.items()
    }
