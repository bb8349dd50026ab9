"""Fuse generation with the stages after it, as RLHFuse (arXiv 2409.13221, section 4). Pure.

Generation starts as on a static fleet. When only a tail of the samples is left, all of it moves, once per step, to the
fewest actors that have room for it, preferring those that already have most of it. In the paper the devices of the
other actors then serve scoring and reference; here a turn on a device lasts for a whole phase, as in the live fleet.

No actor gets more sequences than a full batch (`KNEE`), nor more than its KV memory holds if all of them grow to the
longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from rlhfless.scaling.policies.fleet import (
    Contexts,
    Inputs,
    PolicyContext,
    assign_groups,
    note,
    rescue,
    shares_to_least,
    start,
)
from rlhfless.scaling.policy import Action, EngineLimits, Event, Heartbeat, Lost, Move, StepBegan, StepView
from rlhfless.spec.base import SpecModel

KNEE = 2.0
"""A batch is full when its iteration takes this many times as long as that of one sequence. Beyond that, an iteration
spends more on its sequences than on the weights that they share, and gathering the tail would make the step longer."""


class TailSpec(SpecModel):
    """RLHFuse's fusion of generation with the following stages (arXiv 2409.13221)."""

    type: Literal["rlhfuse_tail"] = "rlhfuse_tail"

    tail_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Fraction of the step's samples remaining at which the tail is migrated to fewer actors."""


class RLHFuseTail:
    """The policy's state in one run."""

    def __init__(self, settings: TailSpec) -> None:
        self._tail_share = settings.tail_share
        self._contexts = Contexts()
        self._gathered = False
        """Whether the policy has moved the tail of this step."""

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        now = self._contexts.of(at_s, view)
        actors = now.layout.generation
        match event:
            case StepBegan():
                self._gathered = False
                return [*start(now, actors), *assign_groups(now, actors)]
            case Heartbeat() if not self._gathered and now.left <= self._tail_share * view.finished.size:
                self._gathered = True
                return self._gather(now)
            case Lost(slot, samples):
                return rescue(now, slot, samples)
        return []

    def _gather(self, now: PolicyContext) -> list[Action]:
        """Move the tail to the fewest actors that have room for it."""
        loads = now.loads
        working = [slot for slot in now.layout.generation if loads[slot] > 0]
        takers = _takers(now, working)
        givers = [slot for slot in working if slot not in takers]
        tail = [now.view.samples_at(slot) for slot in givers]
        moved = sum(samples.size for samples in tail)
        actions: list[Action] = []
        if moved:
            target = np.repeat(takers, shares_to_least(moved, loads[takers]))
            begins = np.cumsum([0, *(samples.size for samples in tail)])
            for giver, samples, begin in zip(givers, tail, begins, strict=False):
                goes = target[begin : begin + samples.size]
                actions += [Move(giver, int(to), samples[goes == to]) for to in np.unique(goes)]
        inputs: Inputs = {"left": int(loads.sum()), "moved": moved, "tail_share": self._tail_share}
        return [*actions, note(now, "migrate", f"{len(takers)} actors keep the tail", inputs)]


def _takers(now: PolicyContext, working: list[int]) -> list[int]:
    """Return the fewest actors that have room for the tail, the actors with most of it first."""
    view, loads = now.view, now.loads
    order = sorted(working, key=lambda slot: (-loads[slot], slot))
    left = ~view.finished
    most_tokens = float(view.prompt_tokens[view.group[left]].sum() + left.sum() * view.fleet.max_tokens)
    sequences, tokens = int(left.sum()), most_tokens
    for count, slot in enumerate(order, 1):
        engine = now.layout.replica_slots[slot].engine
        assert engine is not None  # set in every slot for generation
        sequences -= _full_batch(engine)
        tokens -= engine.kv_capacity_tokens
        if sequences <= 0 and tokens <= 0:
            return order[:count]
    return order


def _full_batch(engine: EngineLimits) -> int:
    """Return the largest batch whose iteration takes at most `KNEE` times as long as that of one sequence."""
    limit_s, low, high = KNEE * engine.model.iteration_s(1), 1, engine.max_sequences
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if engine.model.iteration_s(middle) <= limit_s else (low, middle - 1)
    return low
