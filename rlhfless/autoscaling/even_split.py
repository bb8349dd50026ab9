"""Samples split evenly among the actors, without any forecast: for evaluations, and after a fault of the policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfless.records import ReplicaState
from rlhfless.scaling.policy import Action, Assign, Event, Ints, Lost, Move, Serving, StepBegan, StepView

UP = (ReplicaState.STALE, ReplicaState.SERVING)
"""States of an actor that serves, or will serve as soon as it has loaded the step's weights."""


class EvenSplit:
    """Gives each prompt, new or lost, to the actor with the fewest samples; an actor that joins gets half of the
    difference to the busiest actor.

    It starts and releases no actor, and gives samples only to actors that are up.
    """

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:  # noqa: ARG002
        """See rlhfless.scaling.policy.Policy."""
        match event:
            case StepBegan():
                return split_evenly(view, np.flatnonzero(~view.finished))
            case Lost(samples=samples):
                return split_evenly(view, samples)
            case Serving(slot):
                return _share(view, slot)
        return ()


def split_evenly(view: StepView, samples: Ints) -> list[Assign]:
    """Gives unassigned samples to the actors that are up, a prompt at a time, each to the actor with the fewest.

    If no actor is up, the first starting actor gets all of them; if none is starting, the answer is empty.
    """
    slots = _slots(view, *UP) or _slots(view, ReplicaState.STARTING)[:1]
    load = {slot: view.samples_at(slot).size for slot in slots}
    given: dict[int, list[Ints]] = {slot: [] for slot in slots}
    if not slots or not samples.size:
        return []
    for siblings in np.split(samples, np.flatnonzero(np.diff(view.group[samples])) + 1):
        slot = min(slots, key=lambda slot: (load[slot], slot))
        load[slot] += siblings.size
        given[slot].append(siblings)
    return [Assign(slot, np.concatenate(blocks)) for slot, blocks in given.items() if blocks]


def _share(view: StepView, joined: int) -> list[Action]:
    load = {slot: view.samples_at(slot).size for slot in _slots(view, *UP)}
    busiest = max(load, key=lambda slot: (load[slot], -slot), default=joined)
    lead = (load.get(busiest, 0) - load.get(joined, 0)) // 2
    # The last samples: these are whole groups, because siblings have consecutive numbers.
    return [Move(busiest, joined, view.samples_at(busiest)[-lead:])] if lead > 0 else []


def _slots(view: StepView, *states: ReplicaState) -> list[int]:
    return [slot for slot in view.fleet.generation() if view.slots[slot].state in states]
