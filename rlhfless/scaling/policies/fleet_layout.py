"""What a policy sees when it is asked: the time, the step, and which rooms share devices. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.records import FunctionName, ReplicaState
from rlhfless.scaling.policy import NOBODY, Ints, Room, StepView

RELEASABLE = frozenset({ReplicaState.STARTING, ReplicaState.STALE, ReplicaState.SERVING})
"""States in which a replica holds its devices and can be released; a start that is under way is called off."""


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
    """For each place, the places that take turns with it on a device."""
    learner_nodes: frozenset[str]
    alike: tuple[Ints, ...]
    """Places for generation actors that decode, in sets that differ in nothing but where they are."""

    @classmethod
    def of(cls, rooms: tuple[Room, ...]) -> Layout:
        """Raises ValueError if no room can decode."""
        engines = [(place, room.engine) for place, room in enumerate(rooms) if room.engine is not None]
        generation = tuple(place for place, engine in engines if not engine.prefill_only)
        if not generation:
            raise ValueError("no room holds a generation actor that decodes; give the fleet at least one")
        prefill = tuple(place for place, engine in engines if engine.prefill_only)
        by_device: dict[str, set[int]] = {}
        in_turn = [() if room.beside else room.devices for room in rooms]
        for place, devices in enumerate(in_turn):
            for device in devices:
                by_device.setdefault(device, set()).add(place)
        neighbours = tuple(
            frozenset().union(*(by_device[device] for device in devices)) - {place}
            for place, devices in enumerate(in_turn)
        )
        others = tuple(place for place, room in enumerate(rooms) if room.function is not FunctionName.GENERATION)
        nodes = frozenset(room.node for room in rooms if room.function is FunctionName.LEARNER)
        alike: dict[tuple[str, bool], list[int]] = {}
        for place in generation:
            alike.setdefault((rooms[place].kind, _shared(rooms, neighbours, place)), []).append(place)
        sets = tuple(np.array(places) for places in alike.values())
        return cls(rooms, generation, prefill, others, neighbours, nodes, sets)

    def shared(self, place: int) -> bool:
        """Whether another function may want the devices of a place."""
        return _shared(self.rooms, self.neighbours, place)

    def slots(self, place: int) -> int:
        """Sequences that an actor there runs at once."""
        engine = self.rooms[place].engine
        return 0 if engine is None else engine.max_sequences


def _shared(rooms: Sequence[Room], neighbours: Sequence[frozenset[int]], place: int) -> bool:
    return any(rooms[other].function is not rooms[place].function for other in neighbours[place])


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """When a policy is asked, and what it sees."""

    at_s: float
    view: StepView
    layout: Layout

    def awake(self, place: int) -> bool:
        """Whether a replica there holds its devices and is not on its way out."""
        return self.view.places[place].state in RELEASABLE

    def absent(self, place: int) -> bool:
        """Whether there is no replica or one that sleeps, so that a Start does anything there."""
        return self.view.places[place].state in (None, ReplicaState.SLEEPING)

    @property
    def left(self) -> int:
        """Samples that have not ended."""
        return int(self.view.finished.size - np.count_nonzero(self.view.finished))

    @property
    def loads(self) -> Ints:
        """`[places]`: unfinished samples that belong to each."""
        return np.bincount(self.view.home - NOBODY, minlength=self.places + 1)[1:]

    @property
    def tokens(self) -> float:
        """Drawn so far in the step, with a prompt for each sample."""
        return float(self.view.tokens.sum() + self.view.prompt_tokens[self.view.group].sum())

    @property
    def places(self) -> int:
        return len(self.view.places)


class Contexts:
    """Makes contexts, and keeps the layout of the fleet that was shown last: rooms hardly ever change."""

    def __init__(self) -> None:
        self._layout: Layout | None = None

    def of(self, at_s: float, view: StepView) -> PolicyContext:
        if self._layout is None or self._layout.rooms is not view.fleet.rooms:
            self._layout = Layout.of(view.fleet.rooms)
        return PolicyContext(at_s, view, self._layout)
