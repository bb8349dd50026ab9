"""Which device slots each function may hold, and how much of them. Pure.

A slot is one device of one node: a GPU, or a CPU core. Co-located functions take turns on a slot, so each holds an
equal share of it: its memory is occupied and no other function can have that share. Shares of a slot add up to at most
1, which Ray enforces (a custom resource per slot) and which makes the bill of a run at most slots x price x time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfless.records import FunctionName
from rlhfless.spec import PlacementSpec, RunSpec


@dataclass(frozen=True, slots=True)
class Slot:
    """One device of one node."""

    name: str
    """Such as `cpu-0`; also the name of the Ray resource, with a prefix."""
    kind: str
    """Key of the price book, such as `cpu-core` or `h100`."""
    index: int
    """Number of the core or GPU on its node."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Room for one replica: its slots, and the share it holds of each."""

    slots: tuple[Slot, ...]
    share: float


@dataclass(frozen=True, slots=True)
class Placement:
    """A seat for every replica that a run may start."""

    seats: Mapping[FunctionName, tuple[Seat, ...]]

    def seat(self, function: FunctionName, index: int) -> Seat:
        """The seat of a function's replica number `index`."""
        return self.seats[function][index]


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
    slots: Sequence[Slot],
    *,
    generation_actors: int,
    slots_per_actor: int,
    learner_ranks: int,
    functions: Sequence[FunctionName],
) -> Placement:
    """Give every replica its seat.

    Co-located: actor i has slots i*k .. i*k+k-1, wrapping around if there are more actors than slots; the learner has
    all slots; the single replicas of the other functions sit on the last slot, then the one before.
    Disaggregated: the last `learner_devices` slots belong to the learner side, the others to generation.

    Raises PlacementError if a side has no device or an actor needs more slots than its side has.
    """
    slots = slots[: spec.devices or len(slots)]
    if len(slots) < (spec.devices or 1):
        raise PlacementError(f"placement.devices asks for {spec.devices} device(s), but {len(slots)} are there")
    generation, learning = _sides(spec, slots)
    if slots_per_actor > len(generation):
        raise PlacementError(
            f"generation.engine.tensor_parallel_size is {slots_per_actor}, but generation has {len(generation)} "
            "device(s); lower it, or raise placement.devices"
        )
    chosen: dict[FunctionName, list[tuple[Slot, ...]]] = {
        FunctionName.GENERATION: [
            tuple(generation[(i * slots_per_actor + j) % len(generation)] for j in range(slots_per_actor))
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


def _sides(spec: PlacementSpec, slots: Sequence[Slot]) -> tuple[Sequence[Slot], Sequence[Slot]]:
    if spec.mode == "colocated":
        return slots, slots
    if len(slots) <= spec.learner_devices:
        raise PlacementError(
            f"placement.learner_devices is {spec.learner_devices} and the run has {len(slots)} device(s), which "
            "leaves none for generation; use mode colocated, or more devices"
        )
    return slots[: -spec.learner_devices], slots[-spec.learner_devices :]


def _with_shares(
    chosen: Mapping[FunctionName, Sequence[tuple[Slot, ...]]],
) -> dict[FunctionName, tuple[Seat, ...]]:
    """A replica's share is that of its most crowded slot, so that every slot's shares add up to at most 1."""
    crowd = Counter(slot.name for seats in chosen.values() for seat in seats for slot in set(seat))
    return {
        function: tuple(Seat(seat, 1.0 / max(crowd[slot.name] for slot in seat)) for seat in seats)
        for function, seats in chosen.items()
    }
