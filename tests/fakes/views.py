"""Handmade fleets and steps as a policy sees them, and the plainest possible policies."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from rlhfless.records import FunctionName, FunctionRole, ReplicaState
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.policy import (
    UNASSIGNED,
    Action,
    Assign,
    EngineLimits,
    Event,
    FleetView,
    Generated,
    Heartbeat,
    Idle,
    Lost,
    Move,
    Release,
    ReplicaSlot,
    SlotView,
    Start,
    StepBegan,
    StepView,
)

MODEL = LinearEngine(fixed_s=0.01, sequence_s=0.0005, context_s=0.0, prefill_token_s=1e-5, prefill_context_s=0.0)
ENGINE = EngineLimits(MODEL, kv_capacity_tokens=10_000, max_sequences=8)

UP = SlotView(ReplicaState.SERVING)
ABSENT = SlotView(None)
ASLEEP = SlotView(ReplicaState.STALE)


def replica_slot(index: int, **changes: object) -> ReplicaSlot:
    plain = ReplicaSlot(
        FunctionName.GENERATION,
        FunctionRole.SAMPLES,
        "h100",
        (f"gpu-{index}",),
        f"node-{index // 2}",
        usd_per_s=0.001,
        start_s=40.0,
        engine=ENGINE,
    )
    return dataclasses.replace(plain, **changes)


def learner(*devices: int, node: str = "node-0") -> ReplicaSlot:
    names = tuple(f"gpu-{index}" for index in devices)
    usd_per_s = 0.001 * len(devices)
    of = {"function": FunctionName.LEARNER, "role": FunctionRole.UPDATES, "engine": None}
    return replica_slot(0, devices=names, node=node, usd_per_s=usd_per_s, **of)


def fleet_of(*replica_slots: ReplicaSlot, **changes: object) -> FleetView:
    plain = FleetView(replica_slots, load_s=1.0, move_s=0.01, heartbeat_s=0.5, max_tokens=100)
    return dataclasses.replace(plain, **changes)


def view_of(
    fleet: FleetView,
    slots: Sequence[SlotView],
    *,
    prompts: int,
    siblings: int,
    tokens: Sequence[int] | None = None,
    finished: Sequence[bool] | None = None,
    home: Sequence[int] | None = None,
    step: int = 1,
    prompt_ids: Sequence[str] | None = None,
) -> StepView:
    samples = prompts * siblings
    return StepView(
        fleet,
        tuple(slots),
        step,
        tuple(prompt_ids or [f"p{i}" for i in range(prompts)]),
        np.full(prompts, 10),
        np.repeat(np.arange(prompts), siblings),
        np.array(tokens if tokens is not None else [0] * samples),
        np.array(finished if finished is not None else [False] * samples),
        np.zeros(samples, bool),
        np.array(home if home is not None else [UNASSIGNED] * samples),
    )


def homes(left: dict[int, list[int]], samples: int) -> list[int]:
    """Return the slot of each sample in `left` (slot: samples), `[samples]`; UNASSIGNED for ended samples."""
    home = [UNASSIGNED] * samples
    for slot, mine in left.items():
        for sample in mine:
            home[sample] = slot
    return home


DOWN = (None, ReplicaState.SLEEPING)


def again(event: Lost, view: StepView) -> tuple[Start, ...]:
    """Return the start of a replacement for a lost actor, unless another step that lost samples there has requested
    it."""
    return (Start(event.slot),) if view.slots[event.slot].state is None else ()


class Evenly:
    """Keeps all actors running, and gives every actor the same number of groups. Lost samples go to the slot with the
    fewest samples, and the slot that lost its actor gets a new actor."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, Event]] = []

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        self.seen.append((at_s, event))
        if isinstance(event, StepBegan):
            return spread_out(view)
        if isinstance(event, Lost):
            alive = [slot for slot in view.fleet.generation() if view.slots[slot].state not in DOWN]
            target = min(alive, key=lambda slot: len(view.samples_at(slot)), default=event.slot)
            return (*again(event, view), Assign(target, event.samples))
        return ()


class InTurns(Evenly):
    """Runs replicas only while they work: releases actors when generation has ended, and services when they are
    idle."""

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        if isinstance(event, Generated):
            return [Release(slot) for slot in view.fleet.generation() if view.slots[slot].state is ReplicaState.SERVING]
        if isinstance(event, Idle) and event.slot != learner_of(view):
            there = view.slots[event.slot].state is not None  # it may have had the last work of two steps
            return (Release(event.slot),) if there else ()
        return super().decide(at_s, event, view)


class Scripted(Evenly):
    """Acts like Evenly, with additional actions from the test."""

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
            there = [slot for slot in view.fleet.generation() if view.slots[slot].state not in DOWN]
            gone = [slot for slot in there if self.random.integers(2)]
            return [*map(Release, gone), *self.ahead(at_s, view)]
        if isinstance(event, Idle):
            there = view.slots[event.slot].state is ReplicaState.SERVING and event.slot != learner_of(view)
            return (Release(event.slot),) if there and self.random.integers(2) else ()
        return self.fidget(view) if isinstance(event, Heartbeat) else ()

    def fidget(self, view: StepView) -> Sequence[Action]:
        """Return random actions that are allowed but make no sense."""
        count = len(view.fleet.generation())
        others = [Release(slot) for slot in range(count, learner_of(view)) if view.slots[slot].state not in DOWN]
        if others and self.random.integers(4) == 0:
            return others
        source, target = self.random.integers(count, size=2).tolist()
        there, samples = view.slots[source], view.samples_at(source)
        if there.state in DOWN:
            return (Start(source),)
        if source == target or self.asked > 400:
            return ()
        if not len(samples):
            idle = there.state is ReplicaState.SERVING
            return (Release(source),) if idle else ()
        if view.slots[target].state in DOWN:
            return (Start(target), Move(source, target, samples[:1]))
        return (Move(source, target, self.random.permutation(samples)[: 1 + len(samples) // 2]),)

    def ahead(self, at_s: float, view: StepView) -> list[Action]:
        """Return starts at later times, on devices that no other replica wants. Some will be void."""
        crowd = Counter(device for replica_slot in view.fleet.replica_slots for device in replica_slot.devices)
        alone = [
            slot for slot, replica_slot in enumerate(view.fleet.replica_slots) if crowd[replica_slot.devices[0]] == 1
        ]
        slots = self.random.choice(alone, size=2).tolist()
        return [Start(slot, at_s + float(self.random.uniform(0.1, 2.0))) for slot in slots]


def learner_of(view: StepView) -> int:
    """Return the learner's slot, which comes last."""
    return len(view.slots) - 1


def spread_out(view: StepView) -> list[Action]:
    """Return actions that start all actors and distribute the groups round-robin."""
    first = view.fleet.generation()
    starts: list[Action] = []
    for slot, replica_slot in enumerate(view.fleet.replica_slots):
        if replica_slot.function == FunctionName.GENERATION and view.slots[slot].state in DOWN:
            starts.append(Start(slot))
    return starts + [Assign(slot, np.flatnonzero(view.group % len(first) == turn)) for turn, slot in enumerate(first)]
