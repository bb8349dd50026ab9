"""RLHFless as published (arXiv 2602.22718), with all its mechanisms that act during a run. Pure.

At the start of a step, prompts are sorted by the EWMA of their own lengths. For each number of actors N the list is cut
into N contiguous groups of equal count, and the policy takes the N that minimises a weighted sum of normalised time and
cost. The longest group goes to the learner's node. While the step runs, an actor that has finished the share tau of its
group moves the remaining samples to actors that have finished their own groups and may run more sequences. An actor
without samples is released, unless it is needed for samples that will still be moved. Actors start ahead of the next
step, by the shortest step seen so far.

docs/policies.md lists, for each mechanism, the parts that the paper specifies and the parts that had to be filled in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from rlhfless.records import FunctionRole
from rlhfless.scaling.policies.cost_aware.group_times import ActorTypeCache, Floats, GroupTimes, responses
from rlhfless.scaling.policies.fleet import (
    Contexts,
    Inputs,
    Layout,
    PolicyContext,
    note,
    rescue,
    samples_by_prompt,
    start,
)
from rlhfless.scaling.policy import (
    UNASSIGNED,
    Action,
    Assign,
    Event,
    Generated,
    Heartbeat,
    Idle,
    Ints,
    Lost,
    Move,
    Release,
    Start,
    StepBegan,
    StepEnded,
    StepView,
)
from rlhfless.spec.base import MOST_S, SpecModel, Steps


class RLHFlessPaperSpec(SpecModel):
    """RLHFless as published (arXiv 2602.22718). See docs/policies.md for the source of each value."""

    type: Literal["rlhfless_published"] = "rlhfless_published"

    time_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Lambda: weight of normalized time against normalized cost."""
    window: Steps = 1
    """Window of the EWMA of a prompt's lengths: alpha = 2 / (window + 1). With 1, only the last visit counts."""
    cut_share: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Tau: an actor is cut when this fraction of its samples has finished."""
    first_guess_tokens: Annotated[float, Field(ge=1)] = 128.0
    """Assumed response length in tokens before any response was seen. Later, a prompt without history gets the mean of
    all responses."""
    prewarm_buffer_s: Annotated[float, Field(ge=0, le=MOST_S)] = 5.0
    """Seconds before the next step is expected at which actors should be ready. The expectation is based on the
    shortest step so far."""


class RLHFlessPublished:
    """The policy's state in one run."""

    def __init__(self, settings: RLHFlessPaperSpec) -> None:
        self._settings = settings
        self._contexts = Contexts()
        self._actor_types = ActorTypeCache()
        self._means: dict[str, float] = {}
        self._seen_tokens, self._seen = 0.0, 0
        self._step, self._began_s = 0, 0.0
        self._shortest_s = math.inf
        self._actors: tuple[int, ...] = ()
        self._owner: Ints = np.empty(0, np.int64)
        """[samples]: the slot of a sample's group; UNASSIGNED once the sample was moved away from it."""
        self._size: Ints = np.empty(0, np.int64)
        """[slots]: samples in its own group."""
        self._finished = 0
        """Finished samples at the policy's last look."""

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        now = self._contexts.of(at_s, view)
        match event:
            case StepBegan():
                self._step, self._began_s = view.step, at_s
                return self._begin(now)
            case Heartbeat() if view.step == self._step:  # the owners are those of the newest step
                return self._look(now)
            case Lost(slot, samples):
                return self._lost(now, slot, samples)
            case Generated():
                self._learn(view)
                left = [slot for slot in now.layout.generation if _may_leave(now, slot)]
                absent = [slot for slot in self._actors if slot in left or now.absent(slot)]
                return [*map(Release, left), *self._prewarm(now.layout, absent)]
            case Idle(slot):
                learner = now.layout.replica_slots[slot].role is FunctionRole.UPDATES
                return [Release(slot)] if _may_leave(now, slot) and not learner else []
            case StepEnded(start_s, end_s):
                self._shortest_s = min(self._shortest_s, end_s - start_s)
        return []

    def _begin(self, now: PolicyContext) -> list[Action]:
        view, layout = now.view, now.layout
        predicted = self._predicted(view)
        by_length = np.argsort(predicted, kind="stable")
        ends = np.concatenate([[0], np.cumsum(np.bincount(view.group)[by_length])])
        order = samples_by_prompt(by_length, view.group)
        cuts, inputs = self._sweep(now, predicted, order, ends)
        self._actors = _near_learner(layout)[: cuts.size - 1]
        self._owner = np.empty(view.group.size, np.int64)
        self._finished = 0
        idle = [slot for slot in layout.generation if slot not in self._actors and _may_leave(now, slot)]
        actions: list[Action] = [*map(Release, idle), *start(now, self._actors)]
        for slot, begin, end in zip(self._actors, cuts[-2::-1], cuts[:0:-1], strict=True):
            group = np.sort(order[begin:end])
            self._owner[group] = slot
            actions.append(Assign(slot, group))
        self._size = np.bincount(self._owner, minlength=now.slots)
        return [*actions, note(now, "plan", f"{len(self._actors)} actors", inputs)]

    def _lost(self, now: PolicyContext, slot: int, samples: Ints) -> list[Action]:
        actions = rescue(now, slot, samples)
        if now.view.step != self._step:
            return actions
        for given in actions:
            if isinstance(given, Assign):
                self._owner[given.samples] = given.slot
        self._size = np.bincount(self._owner - UNASSIGNED, minlength=now.slots + 1)[1:]
        return actions

    def _predicted(self, view: StepView) -> Floats:
        """Return the EWMA of each prompt's lengths [groups]; for a new prompt the mean of all, or the first guess."""
        unseen = self._seen_tokens / self._seen if self._seen else self._settings.first_guess_tokens
        return np.maximum([self._means.get(name, unseen) for name in view.prompt_ids], 1.0)

    def _sweep(self, now: PolicyContext, predicted: Floats, order: Ints, ends: Ints) -> tuple[Ints, Inputs]:
        """Return the cuts between groups for the best number of actors, and the inputs of that decision.

        The groups divide the list `order`, short to long; `ends` [groups + 1] are the cuts between prompts.
        """
        view, layout, prompts = now.view, now.layout, len(now.view.prompt_ids)
        step = responses(predicted[view.group], view.group, view.prompt_tokens)
        times = GroupTimes(self._actor_types.of(layout.replica_slots[layout.generation[0]]), step, order)
        sweep = range(1, min(len(layout.generation), prompts) + 1)
        cuts = [ends[np.arange(actors + 1) * prompts // actors] for actors in sweep]
        work_s = [times.time_s(cut[:-1], cut[1:]) for cut in cuts]
        overhead_s = view.fleet.load_s + _up_s(layout, layout.generation[0])
        time_s = np.array([overhead_s + float(work.max()) for work in work_s])
        held_s = np.array([float((overhead_s + work).sum()) for work in work_s])
        weight = self._settings.time_weight
        best = int(np.argmin(weight * time_s / time_s.max() + (1 - weight) * held_s / held_s.max()))
        inputs: Inputs = {"time_weight": weight, "step_s": float(time_s[best]), "actor_s": float(held_s[best])}
        return cuts[best], inputs

    def _look(self, now: PolicyContext) -> list[Action]:
        """Cut groups and release actors if samples have finished since the last look."""
        finished = int(now.view.finished.sum())
        if finished == self._finished:
            return []
        self._finished = finished
        left = now.loads
        own_left = np.bincount(self._owner[~now.view.finished] - UNASSIGNED, minlength=left.size + 1)[1:]
        actions = self._cut(now, left, own_left)
        return actions + self._release(now, left, own_left)

    def _cut(self, now: PolicyContext, left: Ints, own_left: Ints) -> list[Action]:
        """Move the rests of groups to other actors, and update `left` and `own_left` [slots]."""
        actions: list[Action] = []
        for source in self._actors:
            tail, whole = int(own_left[source]), int(self._size[source])
            if not 0 < tail <= (1 - self._settings.cut_share) * whole:
                continue
            free = {slot: now.layout.max_sequences(slot) - int(left[slot]) for slot in self._through(now, own_left)}
            target = max(free, key=lambda slot: (free[slot], -slot), default=None)
            if target is None or free[target] < tail:
                continue
            samples = np.flatnonzero(~now.view.finished & (self._owner == source))
            self._owner[samples] = UNASSIGNED
            left[target] += tail
            left[source] -= tail
            own_left[source] = 0
            actions.append(Move(source, target, samples))
            inputs: Inputs = {"samples": tail, "of": whole, "cut_share": self._settings.cut_share}
            actions.append(note(now, "migrate", f"slot {source} to {target}", inputs))
        return actions

    def _release(self, now: PolicyContext, left: Ints, own_left: Ints) -> list[Action]:
        """Release empty actors, except those needed to take samples that will still be cut."""
        to_come = sum(
            math.ceil((1 - self._settings.cut_share) * self._size[slot]) for slot in self._actors if own_left[slot] > 0
        )
        actions: list[Action] = []
        for slot in sorted(self._through(now, own_left), key=lambda slot: (left[slot] == 0, slot)):
            if left[slot] == 0 and to_come <= 0 and _may_leave(now, slot):
                actions.append(Release(slot))
            to_come -= now.layout.max_sequences(slot) - int(left[slot])
        return actions

    def _through(self, now: PolicyContext, own_left: Ints) -> list[int]:
        """Return the actors whose own groups have ended or were cut."""
        return [slot for slot in self._actors if own_left[slot] == 0 and now.awake(slot)]

    def _learn(self, view: StepView) -> None:
        alpha = 2 / (self._settings.window + 1)
        counts = np.bincount(view.group)
        means = np.bincount(view.group, view.tokens) / counts
        for name, mean in zip(view.prompt_ids, means.tolist(), strict=True):
            self._means[name] = alpha * mean + (1 - alpha) * self._means.get(name, mean)
        self._seen_tokens += float(view.tokens.sum())
        self._seen += view.tokens.size

    def _prewarm(self, layout: Layout, slots: Sequence[int]) -> list[Action]:
        """Schedule the next starts of these actors, so that they finish before the next step.

        The next step is expected after the shortest step so far.
        """
        if math.isinf(self._shortest_s):
            return []
        next_s = self._began_s + self._shortest_s - self._settings.prewarm_buffer_s
        return [Start(slot, next_s - _up_s(layout, slot)) for slot in slots]


def _near_learner(layout: Layout) -> tuple[int, ...]:
    """Return the slots for generation, those on the learner's node first: they get the longest groups."""
    away = [slot for slot in layout.generation if layout.replica_slots[slot].node not in layout.learner_nodes]
    return (*(slot for slot in layout.generation if slot not in away), *away)


def _may_leave(now: PolicyContext, slot: int) -> bool:
    """Return whether the replica at a slot is awake and its release saves money; others stay [R]."""
    return now.awake(slot) and now.layout.replica_slots[slot].usd_per_s > 0


def _up_s(layout: Layout, slot: int) -> float:
    """Return the seconds of a cold start of an actor, without loading weights."""
    return layout.replica_slots[slot].reacquire_s + layout.replica_slots[slot].start_s
