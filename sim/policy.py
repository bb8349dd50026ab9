"""Where a policy plugs in: events in, decisions out. It sees no response length and no future.

A policy is asked at every event below, and answers with actions, which are carried out in their order. An action that
the fleet cannot carry out is a fault of the policy and raises; so does one that forgets samples: at every instant each
unfinished sample belongs to a place, or the policy was told that it is lost and gives it to one in its answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlhfless.records import ReplicaState
from rlhfless.sim.kernel import Ints


@dataclass(frozen=True, slots=True)
class Serving:
    """The actor at a place can work: it has loaded the step's weights."""

    place: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The actor at a place was interrupted. These samples are nobody's now."""

    place: int
    samples: Ints


@dataclass(frozen=True, slots=True)
class Beat:
    """Nothing happened; time went on."""


Event = Serving | Lost | Beat


@dataclass(frozen=True, slots=True)
class Assign:
    """Gives samples that are nobody's to a place. They wait there if its actor does not serve yet."""

    place: int
    samples: Ints


@dataclass(frozen=True, slots=True)
class Move:
    """Takes samples from one place to another, with their tokens. What ended meanwhile stays."""

    source: int
    target: int
    samples: Ints


@dataclass(frozen=True, slots=True)
class Start:
    """Starts an actor at a place that has none, or wakes the one that sleeps there."""

    place: int


@dataclass(frozen=True, slots=True)
class Release:
    """Drains an actor that has no samples left, to sleep in `tier`, or to give its device back (None)."""

    place: int
    tier: str | None


Action = Assign | Move | Start | Release


@dataclass(frozen=True, slots=True)
class PlaceView:
    """What may be known of a place, at the instant it is shown."""

    state: ReplicaState | None
    """None: no actor."""
    running: int
    """Samples that decode."""
    waiting: int
    """Samples that prefill, or wait."""
    _home: Ints
    _place: int

    @property
    def samples(self) -> Ints:
        """Unfinished samples that belong to it, sorted. Looked up when asked for."""
        return np.flatnonzero(self._home == self._place)


class Policy(Protocol):
    """Decides where samples are drawn, and which actors live."""

    def decide(self, at_s: float, event: Event, places: Mapping[int, PlaceView]) -> Sequence[Action]:
        """What to do now."""
        ...


class KeepGoing:
    """No policy at all: nothing moves; what is lost goes to the live place with the fewest samples, and the place that
    lost its actor gets a new one."""

    def decide(self, at_s: float, event: Event, places: Mapping[int, PlaceView]) -> Sequence[Action]:  # noqa: ARG002
        if not isinstance(event, Lost):
            return ()
        alive = {place: view for place, view in places.items() if view.state is not None}
        target = min(alive, key=lambda place: (alive[place].running + alive[place].waiting, place), default=event.place)
        return (Start(event.place), Assign(target, event.samples))
