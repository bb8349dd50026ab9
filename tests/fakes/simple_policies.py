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
            alive = [slot for slot in first_slots(view) if view.slots[slot].state not in ASLEEP]
            target = min(alive, key=lambda slot: len(view.samples_at(slot)), default=event.slot)
            return (Start(event.slot), Assign(target, event.samples))
        return ()


class InTurns(Evenly):
    """Replicas are up only while they work: actors are released when generation has ended, other functions when they
    are idle. With a tier, they sleep instead."""

    def __init__(self, tier: str | None = None) -> None:
        super().__init__()
        self.tier = tier

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        if isinstance(event, Generated):
            return [
                Release(slot, self.tier)
                for slot in view.fleet.generation()
                if view.slots[slot].state is ReplicaState.SERVING
            ]
        if isinstance(event, Idle):
            return (Release(event.slot, self.tier),)
        return super().decide(at_s, event, view)


class Scripted(Evenly):
    """Evenly, with further answers of the test's own."""

    def __init__(self, answer: Callable[[float, Event, StepView], Sequence[Action]]) -> None:
        super().__init__()
        self.answer = answer

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        return (*super().decide(at_s, event, view), *self.answer(at_s, event, view))


class Restless:
    """Moves, releases, wakes and restarts at random; but a replica that has done a step makes slot for the others."""

    def __init__(self, seed: int, with_kv: bool) -> None:
        self.random = np.random.default_rng(seed)
        self.with_kv = with_kv
        self.asked = 0

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        self.asked += 1
        if isinstance(event, StepBegan):
            return spread_out(view)
        if isinstance(event, Lost):
            return (Start(event.slot), Assign(event.slot, event.samples))
        if isinstance(event, Generated):
            there = [slot for slot in view.fleet.generation() if view.slots[slot].state not in ASLEEP]
            return [Release(slot, self.tier(view, slot)) for slot in there] + self.ahead(at_s, view)
        if isinstance(event, Idle):
            there = view.slots[event.slot].state is ReplicaState.SERVING
            return (Release(event.slot, self.tier(view, event.slot)),) if there else ()
        return self.fidget(view) if isinstance(event, Beat) else ()

    def fidget(self, view: StepView) -> Sequence[Action]:
        """Something that makes no sense, and is allowed."""
        count = len(view.fleet.generation())
        others = [Release(slot) for slot in range(count, len(view.slots)) if view.slots[slot].state not in ASLEEP]
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
            return (Release(source, self.tier(view, source)),) if idle else ()
        if view.slots[target].state in ASLEEP:
            return (Start(target), Move(source, target, samples[:1]))
        return (Move(source, target, self.random.permutation(samples)[: 1 + len(samples) // 2], self.with_kv),)

    def ahead(self, at_s: float, view: StepView) -> list[Action]:
        """Starts for a time to come, where no other replica wants the device; some will be void."""
        crowd = Counter(device for replica_slot in view.fleet.replica_slots for device in replica_slot.devices)
        alone = [
            slot for slot, replica_slot in enumerate(view.fleet.replica_slots) if crowd[replica_slot.devices[0]] == 1
        ]
        slots = self.random.choice(alone, size=2).tolist()
        return [Start(slot, at_s + float(self.random.uniform(0.1, 2.0))) for slot in slots]

    def tier(self, view: StepView, slot: int) -> str | None:
        """Any, or none; a replica that is not up yet can only be released."""
        if view.slots[slot].state is ReplicaState.STARTING:
            return None
        return str(self.random.choice(list(view.fleet.replica_slots[slot].wake_s))) if self.random.integers(2) else None


def first_slots(view: StepView) -> list[int]:
    """Where samples begin: on the actors that prefill, if there are some."""
    slots = view.fleet.generation()
    prefill = [slot for slot in slots if view.fleet.replica_slots[slot].engine.prefill_only]
    return prefill or list(slots)


def spread_out(view: StepView) -> list[Action]:
    """All actors up, and the groups in turn on the slots where samples begin."""
    first = first_slots(view)
    starts: list[Action] = []
    for slot, replica_slot in enumerate(view.fleet.replica_slots):
        if replica_slot.function == FunctionName.GENERATION and view.slots[slot].state in ASLEEP:
            starts.append(Start(slot))
    return starts + [Assign(slot, np.flatnonzero(view.group % len(first) == turn)) for turn, slot in enumerate(first)]
