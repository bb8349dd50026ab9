"""Context of a policy's decisions: the time, the step, and the purpose of each slot. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhfless.records import Decision, FunctionRole, ReplicaState
from rlhfless.scaling.policy import (
    UNASSIGNED,
    Action,
    Assign,
    Ints,
    Note,
    ReplicaSlot,
    Start,
    StepView,
)

RELEASABLE = frozenset({ReplicaState.STARTING, ReplicaState.STALE, ReplicaState.SERVING})
"""States in which a replica holds its devices and can be released; a start in progress is cancelled."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Properties of the fleet that depend only on the slots."""

    replica_slots: tuple[ReplicaSlot, ...]
    generation: tuple[int, ...]
    """Slots for generation actors that the run may use now."""
    others: tuple[int, ...]
    """Slots for all other functions except prefill, which no policy controls."""
    learner_nodes: frozenset[str]

    @classmethod
    def of(cls, replica_slots: tuple[ReplicaSlot, ...]) -> Layout:
        """Return the layout of these slots. Raises ValueError if none holds a generation actor."""
        generation = tuple(
            slot
            for slot, replica_slot in enumerate(replica_slots)
            if replica_slot.engine is not None and replica_slot.usable
        )
        if not generation:
            raise ValueError("no slot holds a generation actor; give the fleet at least one")
        others = tuple(
            slot
            for slot, replica_slot in enumerate(replica_slots)
            if replica_slot.role not in (FunctionRole.SAMPLES, FunctionRole.PREFILLS)
        )
        nodes = frozenset(
            replica_slot.node for replica_slot in replica_slots if replica_slot.role is FunctionRole.UPDATES
        )
        return cls(replica_slots, generation, others, nodes)

    def max_sequences(self, slot: int) -> int:
        """Return the number of sequences that an actor there runs at once."""
        engine = self.replica_slots[slot].engine
        return 0 if engine is None else engine.max_sequences


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """The time and the view of a policy's decision."""

    at_s: float
    view: StepView
    layout: Layout

    def awake(self, slot: int) -> bool:
        """Return whether a replica there holds its devices and is not being removed."""
        return self.view.slots[slot].state in RELEASABLE

    def is_learner(self, slot: int) -> bool:
        """Return whether the slot holds a trained function."""
        return self.layout.replica_slots[slot].role is FunctionRole.UPDATES

    def absent(self, slot: int) -> bool:
        """Return whether there is no replica, so that a Start has an effect."""
        return self.view.slots[slot].state is None

    @property
    def left(self) -> int:
        """Return the number of unfinished samples."""
        return int(self.view.finished.size - np.count_nonzero(self.view.finished))

    @property
    def loads(self) -> Ints:
        """Return the number of unfinished samples of each slot `[slots]`."""
        return np.bincount(self.view.home - UNASSIGNED, minlength=self.slots + 1)[1:]

    @property
    def tokens(self) -> float:
        """Return the tokens of the step so far, with a prompt for each sample."""
        return float(self.view.tokens.sum() + self.view.prompt_tokens[self.view.group].sum())

    @property
    def slots(self) -> int:
        return len(self.view.slots)


class Contexts:
    """Factory of contexts that caches the last fleet's layout, since slots seldom change."""

    def __init__(self) -> None:
        self._layout: Layout | None = None

    def of(self, at_s: float, view: StepView) -> PolicyContext:
        if self._layout is None or self._layout.replica_slots is not view.fleet.replica_slots:
            self._layout = Layout.of(view.fleet.replica_slots)
        return PolicyContext(at_s, view, self._layout)


Inputs = dict[str, float | int | str | bool]
"""The inputs of a decision, for the ledger."""


def note(now: PolicyContext, kind: str, choice: str, inputs: Inputs) -> Note:
    """Return a decision for the ledger."""
    return Note(Decision(now.view.step, now.at_s, kind, choice, inputs))


def start(now: PolicyContext, slots: Iterable[int]) -> list[Action]:
    """Start replicas at the slots that have none."""
    return [Start(slot) for slot in slots if now.absent(slot)]


def rescue(now: PolicyContext, slot: int, samples: Ints) -> list[Action]:
    """Handle a loss: start a new actor at the slot, and assign its samples to awake actors, or to the new one."""
    return [*start(now, [slot]), *assign_to_least(samples, awake_beside(now, slot) or [slot], now.loads)]


def awake_beside(now: PolicyContext, slot: int) -> list[int]:
    """Return the slots of the other generation actors that hold their devices."""
    return [other for other in now.layout.generation if other != slot and now.awake(other)]


def samples_by_prompt(prompts: Ints, group: Ints) -> Ints:
    """Return the samples [samples], grouped by prompt in the order of `prompts` [prompts].

    `group` [samples] holds each sample's prompt.
    """
    rank = np.empty_like(prompts)
    rank[prompts] = np.arange(prompts.size)
    return np.argsort(rank[group], kind="stable")


def assign_groups(now: PolicyContext, slots: Sequence[int]) -> list[Action]:
    """Assign the step's prompts in order, in proportion to the speed of each slot's engine; siblings stay together."""
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
    """Return the tokens per second [slots] of each slot's engine in a batch of an equal share of the samples.

    The batch is capped at the engine's concurrency limit, and each sequence follows a prompt of mean length.
    """
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
    """Assign samples to the slots with the smallest `loads` [slots], in blocks, so that siblings stay together."""
    if not samples.size:
        return []
    shares = shares_to_least(samples.size, loads[list(slots)])
    blocks = np.split(samples, np.cumsum(shares)[:-1])
    return [Assign(slot, block) for slot, block in zip(slots, blocks, strict=True) if block.size]


def shares_to_least(samples: int, loads: Ints) -> Ints:
    """Return how many of `samples` each slot [slots] gets, so that the loads become as equal as possible."""
    order = np.argsort(loads, kind="stable")
    filled = loads[order]
    # The lowest slots are filled together: with k of them, the common level is (their sum + samples) / k.
    level = (np.cumsum(filled) + samples) / np.arange(1, filled.size + 1)
    rising = int(np.argmax(np.append(filled[1:], np.inf) >= level)) + 1
    shares: Ints = np.zeros(loads.size, np.int64)
    shares[order[:rising]] = int(level[rising - 1]) - filled[:rising]
    shares[order[: samples - int(shares.sum())]] += 1
    return shares
