"""Actions that several policies share: starting, and assigning samples. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfless.records import Decision
from rlhfless.scaling.policies.fleet_layout import PolicyContext
from rlhfless.scaling.policy import (
    Action,
    Assign,
    Ints,
    Note,
    Start,
)

Inputs = dict[str, float | int | str | bool]
"""The inputs of a decision, for the ledger."""


def note(now: PolicyContext, kind: str, choice: str, inputs: Inputs) -> Note:
    """A decision for the ledger."""
    return Note(Decision(now.view.step, now.at_s, kind, choice, inputs))


def start(now: PolicyContext, slots: Iterable[int]) -> list[Action]:
    """Starts replicas at the slots that have none."""
    return [Start(slot) for slot in slots if now.absent(slot)]


def rescue(now: PolicyContext, slot: int, samples: Ints) -> list[Action]:
    """After a loss: the slot gets a new actor, and its samples go to the actors that are awake, or wait for the new
    one."""
    return [*start(now, [slot]), *assign_to_least(samples, awake_beside(now, slot) or [slot], now.loads)]


def awake_beside(now: PolicyContext, slot: int) -> list[int]:
    """Slots of the other generation actors that hold their devices."""
    return [other for other in now.layout.generation if other != slot and now.awake(other)]


def samples_by_prompt(prompts: Ints, group: Ints) -> Ints:
    """[samples]: the samples, prompt by prompt in the order of `prompts` [prompts]; `group` [samples] has each one's
    prompt."""
    rank = np.empty_like(prompts)
    rank[prompts] = np.arange(prompts.size)
    return np.argsort(rank[group], kind="stable")


def assign_groups(now: PolicyContext, slots: Sequence[int]) -> list[Action]:
    """Shares of the step's prompts by the speed of each slot's engine, in their order; siblings stay together."""
    groups = len(now.view.prompt_ids)
    speeds = speeds_of(now, slots)
    if speeds.min() == speeds.max():
        ends = np.arange(len(slots) + 1) * groups // len(slots)
    else:
        ends = np.append(0, np.round(np.cumsum(speeds) / speeds.sum() * groups).astype(np.int64))
    cuts = np.searchsorted(now.view.group, ends)
    blocks = ((slot, np.arange(begin, end)) for slot, begin, end in zip(slots, cuts, cuts[1:], strict=False))
    return [Assign(slot, block) for slot, block in blocks if block.size]


def speeds_of(now: PolicyContext, slots: Sequence[int]) -> NDArray[np.float64]:
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
