"""Handmade fleets and steps as a policy sees them, and the plainest possible policies."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.records import FunctionName, FunctionRole, ReplicaState
from rlhfless.scaling.engine_model import EngineModel, decode_s
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.policies.cost_aware.group_times import ActorType, GroupTimes, Responses
from rlhfless.scaling.policies.cost_aware.plan import FleetOptions, Standby
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


# -- slow and exact counterparts of the planner: a loop over iterations, dynamic programs, and brute force


@dataclass(frozen=True)
class Roofline:
    """Engine with a(B) = base + max(memory, per_sequence B). Defaults: an 8B model on an H100."""

    base_s: float = 3e-4
    memory_s: float = 5.9e-3
    per_sequence_s: float = 2e-5
    context_s: float = 4.8e-8
    per_prompt_token_s: float = 2e-5

    def iteration_s(self, sequences: int) -> float:
        return self.base_s + max(self.memory_s, self.per_sequence_s * sequences)

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return self.per_prompt_token_s * tokens


@dataclass(frozen=True)
class Straight:
    """Engine with a(B) = fixed + per_sequence B."""

    fixed_s: float = 1.0
    per_sequence_s: float = 0.5
    context_s: float = 0.0
    per_prompt_token_s: float = 0.0

    def iteration_s(self, sequences: int) -> float:
        return self.fixed_s + self.per_sequence_s * sequences

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return self.per_prompt_token_s * tokens


@dataclass(frozen=True)
class Offer:
    """Actors of a type, in tiers."""

    actor: ActorType
    standby: tuple[Standby, ...]
    between_usd: float


def device(engine: EngineModel, *standby: Standby, between_usd: float = 0.0, **changes: float) -> Offer:
    """Return actors with ample memory that cost 1 USD per second, unless changed."""
    values = {"kv_capacity_tokens": 10**9, "max_sequences": 256, "usd_per_s": 1.0} | changes
    return Offer(ActorType("gpu", engine, **values), standby, between_usd)  # type: ignore[arg-type]


def fleet(offer: Offer, weight_sync_s: float = 0.0, max_actors: int = 1024) -> FleetOptions:
    return FleetOptions(offer.actor, offer.standby, max_actors, weight_sync_s, between_usd=offer.between_usd)


def drained_s(engine: EngineModel, tokens: list[int], prompt: list[int], prompt_tokens: list[int]) -> float:
    """Return one actor's time for samples that all fit: prefill of each prompt, then decoding between ends, in
    sequence."""
    seconds = sum(engine.prefill_s(prompt_tokens[p]) for p in set(prompt))
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    done = 0
    for position, index in enumerate(order):
        running = order[position:]
        context = sum(prompt_tokens[prompt[i]] + done for i in running)
        seconds += decode_s(engine, len(running), context, tokens[index] - done)
        done = tokens[index]
    return seconds


def group_times(step: Responses, offer: Offer) -> np.ndarray:
    """Return the seconds of each group [i, j) of the step's list, `[samples + 1, samples + 1]`; infinite where i >=
    j."""
    times, n = GroupTimes(offer.actor, step, step.list_order), step.tokens.size
    begin, end = np.triu_indices(n + 1, 1)
    table = np.full((n + 1, n + 1), np.inf)
    table[begin, end] = times.time_s(begin, end)
    return table


def least_usd(times_s: np.ndarray, ready_s: list[float], usd_per_s: float, limit_s: float) -> float:
    """Return the exact least cost of contiguous groups on equal devices: one layer per actor, the earliest at the long
    end."""
    least = np.full(times_s.shape[0], np.inf)
    least[-1] = 0.0
    for ready in sorted(ready_s):
        cost = np.where(times_s + ready <= limit_s, (times_s + ready) * usd_per_s, np.inf)
        least = np.minimum(least, (cost + least[None, :]).min(axis=1))
    return float(least[0])


def least_time_s(times_s: np.ndarray, ready_s: list[float]) -> float:
    """Return the exact earliest finish time, by a dynamic program over actors."""
    least = np.full(times_s.shape[0], np.inf)
    least[-1] = 0.0
    for ready in sorted(ready_s):
        least = np.minimum(least, np.maximum(times_s + ready, least[None, :]).min(axis=1))
    return float(least[0])


def brute_force(times_s: np.ndarray, ready_s: list[float]) -> list[tuple[float, float]]:
    """Return (time, device-seconds) of every way to cut the list and assign its parts to actors; later actors get
    shorter parts."""
    n, found = times_s.shape[0] - 1, []
    for parts in range(1, min(n, len(ready_s)) + 1):
        for inner in itertools.combinations(range(1, n), parts - 1):
            cuts = (0, *inner, n)
            work = [float(times_s[i, j]) for i, j in itertools.pairwise(cuts)]
            for allocations in set(itertools.combinations(sorted(ready_s, reverse=True), parts)):
                ends = [a + b for a, b in zip(work, allocations, strict=True)]
                found.append((max(ends), sum(ends)))
    return found
