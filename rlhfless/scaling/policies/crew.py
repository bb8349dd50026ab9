"""What every policy does alike: who shares a device with whom, starting, releasing, and dealing samples out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.records import FunctionName, ReplicaState
from rlhfless.scaling.policy import (
    NOBODY,
    Action,
    Assign,
    FleetView,
    Ints,
    PlaceView,
    Release,
    Room,
    Start,
    StepView,
)

Inputs = dict[str, float | int | str | bool]
"""What a decision was made from, as the ledger keeps it."""

DRAINABLE = frozenset({ReplicaState.STARTING, ReplicaState.STALE, ReplicaState.SERVING})
"""States in which a replica can be released; one that still starts is called off."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What follows from the rooms alone."""

    rooms: tuple[Room, ...]
    generation: tuple[int, ...]
    """Places for generation actors that decode."""
    prefill: tuple[int, ...]
    """Places for generation actors that prefill only, and hand the KV over."""
    others: tuple[int, ...]
    """Places for all other functions."""
    neighbours: tuple[frozenset[int], ...]
    """For each place, those that take turns with it on a device."""
    learner_nodes: frozenset[str]
    alike: tuple[Ints, ...]
    """Places for generation actors that decode, in sets that differ in nothing but where they are."""

    @classmethod
    def of(cls, rooms: tuple[Room, ...]) -> Layout:
        """Raises ValueError if no room can decode."""
        generation = tuple(
            i for i, room in enumerate(rooms) if room.engine is not None and not room.engine.prefill_only
        )
        if not generation:
            raise ValueError("no room holds a generation actor that decodes; give the fleet at least one")
        prefill = tuple(i for i, room in enumerate(rooms) if room.engine is not None and room.engine.prefill_only)
        by_device: dict[str, set[int]] = {}
        in_turn = [() if room.beside else room.devices for room in rooms]
        for place, devices in enumerate(in_turn):
            for device in devices:
                by_device.setdefault(device, set()).add(place)
        neighbours = tuple(
            frozenset().union(*(by_device[device] for device in devices)) - {place}
            for place, devices in enumerate(in_turn)
        )
        others = tuple(i for i, room in enumerate(rooms) if room.function is not FunctionName.GENERATION)
        nodes = frozenset(room.node for room in rooms if room.function is FunctionName.LEARNER)
        alike: dict[tuple[str, bool], list[int]] = {}
        for place in generation:
            alike.setdefault((rooms[place].kind, _shared(rooms, neighbours, place)), []).append(place)
        sets = tuple(np.array(places) for places in alike.values())
        return cls(rooms, generation, prefill, others, neighbours, nodes, sets)

    def shared(self, place: int) -> bool:
        """Whether another function may want its devices."""
        return _shared(self.rooms, self.neighbours, place)


def _shared(rooms: Sequence[Room], neighbours: Sequence[frozenset[int]], place: int) -> bool:
    return any(rooms[other].function is not rooms[place].function for other in neighbours[place])


@dataclass(frozen=True, slots=True)
class Moment:
    """When a policy is asked, and what it sees."""

    at_s: float
    view: StepView
    layout: Layout

    @property
    def left(self) -> int:
        """Samples that have not ended."""
        return int(self.view.finished.size - np.count_nonzero(self.view.finished))

    @property
    def tokens(self) -> float:
        """Drawn so far in the step, with a prompt for each sample."""
        return float(self.view.tokens.sum() + self.view.prompt_tokens[self.view.group].sum())

    @property
    def places(self) -> int:
        return len(self.view.places)


class LayoutCache:
    """The layout of the fleet that was shown last: rooms hardly ever change."""

    def __init__(self) -> None:
        self._layout: Layout | None = None

    def of(self, fleet: FleetView) -> Layout:
        if self._layout is None or self._layout.rooms is not fleet.rooms:
            self._layout = Layout.of(fleet.rooms)
        return self._layout


def asleep_or_absent(place: PlaceView) -> bool:
    """Whether a Start does anything there."""
    return place.state is None or place.state is ReplicaState.SLEEPING


def awake(place: PlaceView) -> bool:
    """Whether it holds its devices and is not on its way out."""
    return place.state in DRAINABLE


def start(view: StepView, places: Iterable[int], at_s: float | None = None) -> list[Action]:
    """Starts or wakes all that are not there."""
    return [Start(place, at_s) for place in places if asleep_or_absent(view.places[place])]


def make_way(view: StepView, layout: Layout, places: Iterable[int]) -> list[Action]:
    """Sends to sleep whoever is awake and idle on the devices of these places."""
    blocking = sorted({other for place in places for other in layout.neighbours[place]} - set(places))
    return [rest(view, other) for other in blocking if awake(view.places[other]) and not view.places[other].working]


def rest(view: StepView, place: int) -> Release:
    """To sleep in the tier that wakes soonest. One that has not come up yet, or has no tier, gives its devices back."""
    starting = view.places[place].state is ReplicaState.STARTING
    return Release(place, None if starting else quickest_tier(view.fleet.rooms[place]))


def retire(view: StepView, place: int) -> list[Action]:
    """A function beside generation is through. Somebody may have sent it to sleep already, who wanted its devices."""
    return [rest(view, place)] if awake(view.places[place]) else []


def quickest_tier(room: Room) -> str | None:
    """The tier that wakes soonest; None for a room without tiers."""
    return min(room.wake_s, key=lambda tier: (room.wake_s[tier], tier), default=None)


def groups_dealt(view: StepView, places: Sequence[int]) -> list[Action]:
    """Equal shares of the step's prompts, in their order; siblings stay together."""
    groups = len(view.prompt_ids)
    cuts = np.searchsorted(view.group, np.arange(len(places) + 1) * groups // len(places))
    blocks = ((place, np.arange(begin, end)) for place, begin, end in zip(places, cuts, cuts[1:], strict=False))
    return [Assign(place, block) for place, block in blocks if block.size]


def load(view: StepView) -> Ints:
    """`[places]`: unfinished samples that belong to each."""
    return np.bincount(view.home - NOBODY, minlength=len(view.places) + 1)[1:]


def shares_to_least(samples: int, loads: Ints) -> Ints:
    """How many of so many samples each place [places] gets, for loads that come as close as they can."""
    order = np.argsort(loads, kind="stable")
    filled = loads[order]
    # The lowest places rise together: with k of them the common level is (their sum + samples) / k.
    level = (np.cumsum(filled) + samples) / np.arange(1, filled.size + 1)
    rising = int(np.argmax(np.append(filled[1:], np.inf) >= level)) + 1
    shares: Ints = np.zeros(loads.size, np.int64)
    shares[order[:rising]] = int(level[rising - 1]) - filled[:rising]
    shares[order[: samples - int(shares.sum())]] += 1
    return shares


def dealt_to_least(samples: Ints, places: Sequence[int], loads: Ints) -> list[Action]:
    """Gives samples to the places with the least, in blocks, so that siblings stay together. `loads` is by place."""
    shares = shares_to_least(samples.size, loads[list(places)])
    blocks = np.split(samples, np.cumsum(shares)[:-1])
    return [Assign(place, block) for place, block in zip(places, blocks, strict=True) if block.size]


def slots(room: Room) -> int:
    """Sequences that an actor there runs at once."""
    return room.engine.max_sequences if room.engine is not None else 0


def awake_beside(view: StepView, layout: Layout, place: int) -> list[int]:
    """Places of the other generation actors that hold their devices."""
    return [other for other in layout.generation if other != place and awake(view.places[other])]


def rescue(view: StepView, layout: Layout, place: int, samples: Ints) -> list[Action]:
    """After a loss: the place gets a new actor, and its samples go to those that are awake, to itself if none is.

    One that had nothing to do, on devices that others take turns on, is started again when its turn comes.
    """
    if not samples.size and layout.shared(place):
        return []
    again = [*make_way(view, layout, [place]), *start(view, [place])]
    if not samples.size:
        return again
    alive = awake_beside(view, layout, place)
    return [*again, *dealt_to_least(samples, alive or [place], load(view))]
