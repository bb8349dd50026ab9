"""Policies that are as plain as can be, for tests of the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from rlhfless.records import FunctionName, ReplicaState
from rlhfless.scaling.policy import (
    Action,
    Assign,
    Beat,
    Event,
    Generated,
    Idle,
    Lost,
    Move,
    Release,
    Start,
    StepBegan,
    StepView,
)

ASLEEP = (None, ReplicaState.SLEEPING)


def again(event: Lost, view: StepView) -> tuple[Start, ...]:
    """The start of an actor in place of a lost one, unless another step that lost samples there has asked for it."""
    return (Start(event.slot),) if view.slots[event.slot].state is None else ()


class Evenly:
    """Keeps all actors up, and gives every actor the same number of groups. What is lost goes to the slot with the
    fewest samples, and the slot that lost its actor gets a new one."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, Event]] = []

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        self.seen.append((at_s, event))
        if isinstance(event, StepBegan):
            return spread_out(view)
        if isinstance(event, Lost):
            alive = [slot for slot in view.fleet.generation() if view.slots[slot].state not in ASLEEP]
            target = min(alive, key=lambda slot: len(view.samples_at(slot)), default=event.slot)
            return (*again(event, view), Assign(target, event.samples))
        return ()


class InTurns(Evenly):
    """Replicas are up only while they work: actors are released when generation has ended, services when they are
    idle."""

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        if isinstance(event, Generated):
            return [Release(slot) for slot in view.fleet.generation() if view.slots[slot].state is ReplicaState.SERVING]
        if isinstance(event, Idle) and event.slot != learner_of(view):
            there = view.slots[event.slot].state is not None  # it may have had the last work of two steps
            return (Release(event.slot),) if there else ()
        return super().decide(at_s, event, view)


class Scripted(Evenly):
    """Evenly, with further answers of the test's own."""

    def __init__(self, answer: Callable[[float, Event, StepView], Sequence[Action]]) -> None:
        super().__init__()
        self.answer = answer

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        return (*super().decide(at_s, event, view), *self.answer(at_s, event, view))


class Restless:
    """Moves, releases and restarts at random."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.asked = 0

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        self.asked += 1
        if isinstance(event, StepBegan):
            return spread_out(view)
        if isinstance(event, Lost):
            return (*again(event, view), Assign(event.slot, event.samples))
        if isinstance(event, Generated):
            there = [slot for slot in view.fleet.generation() if view.slots[slot].state not in ASLEEP]
            gone = [slot for slot in there if self.random.integers(2)]
            return [*map(Release, gone), *self.ahead(at_s, view)]
        if isinstance(event, Idle):
            there = view.slots[event.slot].state is ReplicaState.SERVING and event.slot != learner_of(view)
            return (Release(event.slot),) if there and self.random.integers(2) else ()
        return self.fidget(view) if isinstance(event, Beat) else ()

    def fidget(self, view: StepView) -> Sequence[Action]:
        """Something that makes no sense, and is allowed."""
        count = len(view.fleet.generation())
        others = [Release(slot) for slot in range(count, learner_of(view)) if view.slots[slot].state not in ASLEEP]
        if others and self.random.integers(4) == 0:
            return others
        source, target = self.random.integers(count, size=2).tolist()
        there, samples = view.slots[source], view.samples_at(source)
        if there.state in ASLEEP:
            return (Start(source),)
        if source == target or self.asked > 400:
            return ()
        if not len(samples):
            idle = there.state is ReplicaState.SERVING
            return (Release(source),) if idle else ()
        if view.slots[target].state in ASLEEP:
            return (Start(target), Move(source, target, samples[:1]))
        return (Move(source, target, self.random.permutation(samples)[: 1 + len(samples) // 2]),)

    def ahead(self, at_s: float, view: StepView) -> list[Action]:
        """Starts for a time to come, where no other replica wants the device; some will be void."""
        crowd = Counter(device for replica_slot in view.fleet.replica_slots for device in replica_slot.devices)
        alone = [
            slot for slot, replica_slot in enumerate(view.fleet.replica_slots) if crowd[replica_slot.devices[0]] == 1
        ]
        slots = self.random.choice(alone, size=2).tolist()
        return [Start(slot, at_s + float(self.random.uniform(0.1, 2.0))) for slot in slots]


def learner_of(view: StepView) -> int:
    """The learner's slot, which comes last."""
    return len(view.slots) - 1


def spread_out(view: StepView) -> list[Action]:
    """All actors up, and the groups in turn on them."""
    first = view.fleet.generation()
    starts: list[Action] = []
    for slot, replica_slot in enumerate(view.fleet.replica_slots):
        if replica_slot.function == FunctionName.GENERATION and view.slots[slot].state in ASLEEP:
            starts.append(Start(slot))
    return starts + [Assign(slot, np.flatnonzero(view.group % len(first) == turn)) for turn, slot in enumerate(first)]
