"""Actions that several policies share: starting, making way, releasing, and assigning samples. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfless.records import Decision, ReplicaState
from rlhfless.scaling.policies.fleet_layout import PolicyContext
from rlhfless.scaling.policy import (
    Action,
    Assign,
    Event,
    Generated,
    Idle,
    Ints,
    Lost,
    Note,
    Release,
    ReplicaSlot,
    Start,
)

Inputs = dict[str, float | int | str | bool]
"""The inputs of a decision, for the ledger."""


def note(now: PolicyContext, kind: str, choice: str, inputs: Inputs) -> Note:
    """A decision for the ledger."""
    return Note(Decision(now.view.step, now.at_s, kind, choice, inputs))


def start(now: PolicyContext, slots: Iterable[int]) -> list[Action]:
    """Starts or wakes replicas at the slots that have none awake."""
    return [Start(slot) for slot in slots if now.absent(slot)]


def make_way(now: PolicyContext, slots: Iterable[int]) -> list[Action]:
    """Puts replicas to sleep that are awake and idle on the devices of these slots."""
    blocking = sorted({other for slot in slots for other in now.layout.neighbours[slot]} - set(slots))
    return [put_to_sleep(now, other) for other in blocking if now.awake(other) and not now.view.slots[other].working]


def put_to_sleep(now: PolicyContext, slot: int) -> Release:
    """Puts a replica into the tier that wakes soonest; without any tier it gives its devices back."""
    return leave(now, slot, quickest_tier(now.layout.replica_slots[slot]))


def leave(now: PolicyContext, slot: int, tier: str | None) -> Release:
    """Puts a replica into a tier; without one, or if it has not come up yet, it gives its devices back."""
    return Release(slot, None if now.view.slots[slot].state is ReplicaState.STARTING else tier)


def quickest_tier(replica_slot: ReplicaSlot) -> str | None:
    """The tier that wakes soonest; None for a slot without tiers."""
    return min(replica_slot.wake_s, key=lambda tier: (replica_slot.wake_s[tier], tier), default=None)


def take_turns(now: PolicyContext, event: Event, actors: Sequence[int]) -> list[Action]:
    """The actions of policies that weigh no costs: a replica on devices that other functions use sleeps when its work
    of the step is done, and a lost actor is started again."""
    match event:
        case Lost(slot, samples):
            return rescue(now, slot, samples)
        case Generated():
            return [put_to_sleep(now, slot) for slot in actors if now.layout.shared(slot) and now.awake(slot)]
        case Idle(slot) if now.layout.shared(slot) and now.awake(slot):  # the replica may have made way already
            return [put_to_sleep(now, slot)]
    return []


def rescue(now: PolicyContext, slot: int, samples: Ints) -> list[Action]:
    """After a loss: the slot gets a new actor, and its samples go to the actors that are awake, or wait for the new
    one.

    An actor without work, on devices that other functions use, is started again only at its next turn. An actor that
    decodes for prefill actors has work until all samples have ended.
    """
    handed = bool(now.layout.prefill) and slot in now.layout.generation and now.left > 0
    if not samples.size and not handed and now.layout.shared(slot):
        return []
    again = [*make_way(now, [slot]), *start(now, [slot])]
    return [*again, *assign_to_least(samples, awake_beside(now, slot) or [slot], now.loads)]


def awake_beside(now: PolicyContext, slot: int) -> list[int]:
    """Slots of the other generation actors that hold their devices."""
    return [other for other in now.layout.generation if other != slot and now.awake(other)]


def assign_groups(now: PolicyContext, slots: Sequence[int]) -> list[Action]:
    """Shares of the step's prompts by the speed of each slot's engine, in their order; siblings stay together."""
    groups = len(now.view.prompt_ids)
    speeds = _speeds(now, slots)
    if speeds.min() == speeds.max():
        ends = np.arange(len(slots) + 1) * groups // len(slots)
    else:
        ends = np.append(0, np.round(np.cumsum(speeds) / speeds.sum() * groups).astype(np.int64))
    cuts = np.searchsorted(now.view.group, ends)
    blocks = ((slot, np.arange(begin, end)) for slot, begin, end in zip(slots, cuts, cuts[1:], strict=False))
    return [Assign(slot, block) for slot, block in blocks if block.size]


def _speeds(now: PolicyContext, slots: Sequence[int]) -> NDArray[np.float64]:
    """[slots]: tokens per second of each slot's engine in a batch of an equal share of the samples, or of as many as it
    runs at once, each behind a prompt of mean length."""
    share, prompt = -(-now.view.group.size // len(slots)), float(now.view.prompt_tokens.mean())
    speeds: dict[int, float] = {}
    by_slot = []
    for slot in slots:
        engine = now.layout.replica_slots[slot].engine
        assert engine is not None  # of a slot for generation
        if id(engine) not in speeds:
            batch = min(share, engine.max_sequences)
            iteration_s = engine.model.iteration_s(batch) + engine.model.context_s * batch * prompt
            speeds[id(engine)] = batch / iteration_s
        by_slot.append(speeds[id(engine)])
    return np.array(by_slot)


def assign_to_least(samples: Ints, slots: Sequence[int], loads: Ints) -> list[Action]:
    """Gives samples to the slots with the smallest loads, in blocks, so that siblings stay together. `loads` is by
    slot."""
    if not samples.size:
        return []
    shares = shares_to_least(samples.size, loads[list(slots)])
    blocks = np.split(samples, np.cumsum(shares)[:-1])
    return [Assign(slot, block) for slot, block in zip(slots, blocks, strict=True) if block.size]


def shares_to_least(samples: int, loads: Ints) -> Ints:
    """The number of `samples` that each slot [slots] gets, so that the loads become as equal as possible."""
    order = np.argsort(loads, kind="stable")
    filled = loads[order]
    # The lowest slots rise together: with k of them the common level is (their sum + samples) / k.
    level = (np.cumsum(filled) + samples) / np.arange(1, filled.size + 1)
    rising = int(np.argmax(np.append(filled[1:], np.inf) >= level)) + 1
    shares: Ints = np.zeros(loads.size, np.int64)
    shares[order[:rising]] = int(level[rising - 1]) - filled[:rising]
    shares[order[: samples - int(shares.sum())]] += 1
    return shares
