"""The events on the agenda of a simulation. They name a slot, and the turn at that slot to which they belong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Due:
    """A start that was asked for ahead of time."""

    slot: int
    turn: int


@dataclass(frozen=True, slots=True)
class Up:
    """A start or wake-up has finished."""

    slot: int
    turn: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load of the weights after `step` training steps has finished."""

    slot: int
    turn: int
    step: int
    begun_s: float


@dataclass(frozen=True, slots=True)
class SpotInterrupted:
    """The machine under a replica is taken away."""

    slot: int
    life: int


@dataclass(frozen=True, slots=True)
class Worked:
    """A service or the learner has finished its work of a step."""

    slot: int
    step: int


Happening = Due | Up | Loaded | SpotInterrupted | Worked
