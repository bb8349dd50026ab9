"""The virtual clock: the events of a simulation, and the agenda that orders them by time.

An event names a slot, and its turn or life at that slot: events of an earlier turn or life are void.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

E = TypeVar("E")
L = TypeVar("L")


@dataclass
class Agenda(Generic[E]):
    """Pending events. Events at one instant keep the order in which they were added."""

    _heap: list[tuple[float, int, E]] = field(default_factory=list)
    _number: count[int] = field(default_factory=count)

    def add(self, at_s: float, event: E) -> None:
        heapq.heappush(self._heap, (at_s, next(self._number), event))

    @property
    def next_s(self) -> float:
        """When the next event is due; infinite if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def pop(self) -> tuple[float, E]:
        """Remove and return the next event and its time. Raises IndexError if there is none."""
        at_s, _, event = heapq.heappop(self._heap)
        return at_s, event

    def pop_like(self, at_s: float, kind: type[L]) -> list[L]:
        """Remove and return the events of a kind due next at `at_s`, up to the first event of another kind."""
        alike: list[L] = []
        while self._heap and self._heap[0][0] == at_s and isinstance(event := self._heap[0][2], kind):
            alike.append(event)
            heapq.heappop(self._heap)
        return alike


@dataclass(frozen=True, slots=True)
class Due:
    """The time of a start that a policy requested in advance has come."""

    slot: int
    turn: int


@dataclass(frozen=True, slots=True)
class Up:
    """A replica has finished its start or wake-up."""

    slot: int
    turn: int


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """An actor has loaded the weights after `step` training steps."""

    slot: int
    turn: int
    step: int
    begun_s: float


@dataclass(frozen=True, slots=True)
class SpotInterrupted:
    """The cloud reclaims the machine of a spot replica."""

    slot: int
    life: int


@dataclass(frozen=True, slots=True)
class Worked:
    """A service or the learner has finished its work of a step."""

    slot: int
    step: int


SimulatedEvent = Due | Up | WeightsLoaded | SpotInterrupted | Worked
