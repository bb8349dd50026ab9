"""The context in which a policy is asked: the time, the step, and what each slot is for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfless.records import FunctionRole, ReplicaState
from rlhfless.scaling.policy import UNASSIGNED, Ints, ReplicaSlot, StepView

RELEASABLE = frozenset({ReplicaState.STARTING, ReplicaState.STALE, ReplicaState.SERVING})
"""States in which a replica holds its devices and can be released; a start in progress is called off."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Properties of the fleet that depend on the slots alone."""

    replica_slots: tuple[ReplicaSlot, ...]
    generation: tuple[int, ...]
    """Slots for generation actors, which the run may use now."""
    others: tuple[int, ...]
    """Slots for all other functions, but not for prefill, which no policy decides."""
    learner_nodes: frozenset[str]
    alike: tuple[Ints, ...]
    """Slots for generation actors, in sets of slots that differ only in their place."""

    @classmethod
    def of(cls, replica_slots: tuple[ReplicaSlot, ...]) -> Layout:
        """The layout of these slots. Raises ValueError if none holds a generation actor."""
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
        alike: dict[str, list[int]] = {}
        for slot in generation:
            alike.setdefault(replica_slots[slot].kind, []).append(slot)
        sets = tuple(np.array(slots) for slots in alike.values())
        return cls(replica_slots, generation, others, nodes, sets)

    def max_sequences(self, slot: int) -> int:
        """Sequences that an actor there runs at once."""
        engine = self.replica_slots[slot].engine
        return 0 if engine is None else engine.max_sequences


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """The time and the view with which a policy is asked."""

    at_s: float
    view: StepView
    layout: Layout

    def awake(self, slot: int) -> bool:
        """Whether a replica there holds its devices and is not on its way out."""
        return self.view.slots[slot].state in RELEASABLE

    def absent(self, slot: int) -> bool:
        """Whether there is no replica, so that a Start has an effect."""
        return self.view.slots[slot].state is None

    @property
    def left(self) -> int:
        """Samples that have not ended."""
        return int(self.view.finished.size - np.count_nonzero(self.view.finished))

    @property
    def loads(self) -> Ints:
        """`[slots]`: unfinished samples that belong to each."""
        return np.bincount(self.view.home - UNASSIGNED, minlength=self.slots + 1)[1:]

    @property
    def tokens(self) -> float:
        """Tokens drawn so far in the step, with a prompt for each sample."""
        return float(self.view.tokens.sum() + self.view.prompt_tokens[self.view.group].sum())

    @property
    def slots(self) -> int:
        return len(self.view.slots)


class Contexts:
    """Makes contexts, and caches the layout of the last fleet: slots seldom change."""

    def __init__(self) -> None:
        self._layout: Layout | None = None

    def of(self, at_s: float, view: StepView) -> PolicyContext:
        if self._layout is None or self._layout.replica_slots is not view.fleet.replica_slots:
            self._layout = Layout.of(view.fleet.replica_slots)
        return PolicyContext(at_s, view, self._layout)
