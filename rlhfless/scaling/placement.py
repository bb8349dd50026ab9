"""Which devices each function may hold, and how much of them. Pure.

A device is a GPU or a CPU core of one node. Co-located functions take turns on a device, so each holds an equal share
of it: its memory is occupied and no other function can have that share. Shares of a device add up to at most 1, which
Ray enforces (a custom resource per device) and which makes the bill of a run at most devices x price x time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
    """The devices of one replica, and its share of each."""

    devices: tuple[Device, ...]
    share: float


@dataclass(frozen=True, slots=True)
class Placement:
    """An allocation for every replica that a run may start."""

    allocations: Mapping[FunctionName, tuple[Allocation, ...]]

    def allocation(self, function: FunctionName, index: int) -> Allocation:
        """The allocation of a function's replica number `index`."""
        return self.allocations[function][index]


class PlacementError(ValueError):
    """There are too few devices; the message says for what, and how many there are."""


def helpers(spec: RunSpec) -> list[FunctionName]:
    """The functions of a run other than generation and the learner; each has one replica."""
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
    if spec.mode != "disaggregated":
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
    """Gives a replica the share of its most crowded device, so that the shares of every device add up to at most 1."""
    crowd = Counter(
        device.name for allocations in chosen.values() for allocation in allocations for device in set(allocation)
    )
    return {
        function: tuple(
            Allocation(allocation, 1.0 / max(crowd[device.name] for device in allocation)) for allocation in allocations
        )
        for function, allocations in chosen.items()
    }
