"""RLHFless as published (arXiv 2602.22718), with all its mechanisms that act during a run. Pure.

At a step's begin, prompts are sorted by the EWMA of their own lengths; for each number of actors N the list is cut into
N contiguous groups of equal count, and N is what a weighted sum of normalised time and cost finds best. The longest
group goes to the learner's node. While the step runs, an actor whose group is done to the share tau hands what is left
to actors that are through with their own groups and have free slots; whoever has nothing left goes, except as many of
those as are needed to take what will still be cut. Before the next step actors start ahead of time, by the shortest
step seen so far.

docs/policies.md says what is known of each mechanism, and what had to be filled in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlhfless.records import Decision, FunctionName, ReplicaState
from rlhfless.scaling.plan import responses
from rlhfless.scaling.plan.cost import GroupTimes
from rlhfless.scaling.plan.responses import Floats
from rlhfless.scaling.policies.crew import (
    Inputs,
    Layout,
    LayoutCache,
    asleep_or_absent,
    awake,
    load,
    make_way,
    quickest_tier,
    rescue,
    slots,
    start,
)
from rlhfless.scaling.policies.offers import Offers
from rlhfless.scaling.policies.settings import PublishedSettings
from rlhfless.scaling.policy import (
    NOBODY,
    Action,
    Assign,
    Beat,
    Event,
    Generated,
    Idle,
    Ints,
    Lost,
    Move,
    Note,
    Release,
    Start,
    StepBegan,
    StepEnded,
    StepView,
)


class Published:
    """State of one run."""

    def __init__(self, settings: PublishedSettings) -> None:
        self._settings = settings
        self._layouts = LayoutCache()
        self._offers = Offers()
        self._means: dict[str, float] = {}
        self._seen_tokens, self._seen = 0.0, 0
        self._began_s = 0.0
        self._shortest_s = math.inf
        self._crew: tuple[int, ...] = ()
        self._owner: Ints = np.empty(0, np.int64)
        """[samples]: the place whose group a sample is in; NOBODY once it was cut from it."""
        self._size: Ints = np.empty(0, np.int64)
        """[places]: samples of its own group."""
        self._finished = 0
        """Samples that had ended when the policy last looked."""

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        layout = self._layouts.of(view.fleet)
        match event:
            case StepBegan():
                self._began_s = at_s
                return self._begin(at_s, view, layout)
            case Beat():
                return self._look(at_s, view, layout)
            case Lost(place, samples):
                actions = rescue(view, layout, place, samples)
                for given in actions:
                    if isinstance(given, Assign):
                        self._owner[given.samples] = given.place
                self._size = np.bincount(self._owner - NOBODY, minlength=len(view.places) + 1)[1:]
                return actions
            case Generated():
                self._learn(view)
                left = [place for place in layout.generation if awake(view.places[place])]
                own = [place for place in self._crew if not layout.shared(place)]
                return [*(_leave(view, layout, place) for place in left), *self._prewarm(layout, own)]
            case Idle(place):
                learner = layout.rooms[place].function is FunctionName.LEARNER
                gone = [_leave(view, layout, place)] if awake(view.places[place]) else []
                # Where steps overlap, some are up for the next one already.
                shared = [p for p in self._crew if layout.shared(p) and asleep_or_absent(view.places[p])]
                return [*gone, *(self._prewarm(layout, shared) if learner else ())]
            case StepEnded(start_s, end_s):
                self._shortest_s = min(self._shortest_s, end_s - start_s)
        return []

    def _begin(self, at_s: float, view: StepView, layout: Layout) -> list[Action]:
        predicted = self._predicted(view)
        by_length = np.argsort(predicted, kind="stable")
        ends = np.concatenate([[0], np.cumsum(np.bincount(view.group)[by_length])])
        rank = np.empty_like(by_length)
        rank[by_length] = np.arange(by_length.size)
        order = np.argsort(rank[view.group], kind="stable")
        cuts, inputs = self._sweep(view, layout, predicted, order, ends)
        self._crew = _near_learner(layout)[: cuts.size - 1]
        self._owner = np.empty(view.group.size, np.int64)
        self._finished = 0
        idle = [place for place in layout.generation if place not in self._crew and awake(view.places[place])]
        actions = (
            make_way(view, layout, self._crew)
            + [_leave(view, layout, place) for place in idle]
            + start(view, self._crew)
        )
        for place, begin, end in zip(self._crew, cuts[-2::-1], cuts[:0:-1], strict=True):
            group = np.sort(order[begin:end])
            self._owner[group] = place
            actions.append(Assign(place, group))
        self._size = np.bincount(self._owner, minlength=len(view.places))
        actions.append(Note(Decision(view.step, at_s, "plan", f"{len(self._crew)} actors", inputs)))
        return actions

    def _predicted(self, view: StepView) -> Floats:
        """[groups]: the EWMA of each prompt; for a new one the mean of all, or the first guess."""
        unseen = self._seen_tokens / self._seen if self._seen else self._settings.first_guess_tokens
        return np.maximum([self._means.get(name, unseen) for name in view.prompt_ids], 1.0)

    def _sweep(self, view: StepView, layout: Layout, predicted: Floats, order: Ints, ends: Ints) -> tuple[Ints, Inputs]:
        """The cuts between the groups of the list `order`, short to long, for the best number of actors, and why.

        `ends` [groups + 1] are the cuts between prompts.
        """
        room, prompts = layout.rooms[layout.generation[0]], len(view.prompt_ids)
        step = responses(predicted[view.group], view.group, view.prompt_tokens)
        times = GroupTimes(self._offers.device(room), step, order)
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

    def _look(self, at_s: float, view: StepView, layout: Layout) -> list[Action]:
        """Cuts and releases, when samples have ended since the last look."""
        finished = int(view.finished.sum())
        if finished == self._finished:
            return []
        self._finished = finished
        left = load(view)
        own_left = np.bincount(self._owner[~view.finished] - NOBODY, minlength=left.size + 1)[1:]
        actions = self._cut(at_s, view, layout, left, own_left)
        return actions + self._release(view, layout, left, own_left)

    def _cut(self, at_s: float, view: StepView, layout: Layout, left: Ints, own_left: Ints) -> list[Action]:
        """`left` and `own_left` [places] are brought up to date with what is moved."""
        actions: list[Action] = []
        for source in self._crew:
            tail, whole = int(own_left[source]), int(self._size[source])
            if not 0 < tail <= (1 - self._settings.cut_share) * whole:
                continue
            free = {place: slots(layout.rooms[place]) - int(left[place]) for place in self._through(view, own_left)}
            target = max(free, key=lambda place: (free[place], -place), default=None)
            if target is None or free[target] < tail:
                continue
            samples = np.flatnonzero(~view.finished & (self._owner == source))
            self._owner[samples] = NOBODY
            left[target] += tail
            left[source] -= tail
            own_left[source] = 0
            actions.append(Move(source, target, samples, with_kv=math.isfinite(view.fleet.kv_token_s)))
            inputs: Inputs = {"samples": tail, "of": whole, "cut_share": self._settings.cut_share}
            actions.append(Note(Decision(view.step, at_s, "migrate", f"place {source} to {target}", inputs)))
        return actions

    def _release(self, view: StepView, layout: Layout, left: Ints, own_left: Ints) -> list[Action]:
        """Whoever is empty goes, except those that are needed to take what will still be cut."""
        to_come = sum(
            math.ceil((1 - self._settings.cut_share) * self._size[place]) for place in self._crew if own_left[place] > 0
        )
        actions: list[Action] = []
        for place in sorted(self._through(view, own_left), key=lambda place: (left[place] == 0, place)):
            if left[place] == 0 and to_come <= 0:
                actions.append(_leave(view, layout, place))
            to_come -= slots(layout.rooms[place]) - int(left[place])
        return actions

    def _through(self, view: StepView, own_left: Ints) -> list[int]:
        """Actors whose own groups have ended or were cut."""
        return [place for place in self._crew if own_left[place] == 0 and awake(view.places[place])]

    def _learn(self, view: StepView) -> None:
        alpha = 2 / (self._settings.window + 1)
        counts = np.bincount(view.group)
        means = np.bincount(view.group, view.tokens) / counts
        for name, mean in zip(view.prompt_ids, means.tolist(), strict=True):
            self._means[name] = alpha * mean + (1 - alpha) * self._means.get(name, mean)
        self._seen_tokens += float(view.tokens.sum())
        self._seen += view.tokens.size

    def _prewarm(self, layout: Layout, places: Sequence[int]) -> list[Action]:
        """Starts those of the crew again, so as to be up before the next step begins, by the shortest step so far.

        Those that share devices with the learner can do so only when it is through.
        """
        if math.isinf(self._shortest_s):
            return []
        next_s = self._began_s + self._shortest_s - self._settings.prewarm_buffer_s
        return [Start(place, next_s - _up_s(layout, place)) for place in places]


def _near_learner(layout: Layout) -> tuple[int, ...]:
    """Places for generation, those on the learner's node first: they get the longest groups."""
    away = [place for place in layout.generation if layout.rooms[place].node not in layout.learner_nodes]
    return (*(place for place in layout.generation if place not in away), *away)


def _leave(view: StepView, layout: Layout, place: int) -> Release:
    starting = view.places[place].state is ReplicaState.STARTING
    return Release(place, None if starting else _tier(layout, place))


def _tier(layout: Layout, place: int) -> str | None:
    """Where functions sleep: nowhere, if sleep costs what the devices cost and nobody else pays for them."""
    room, tier = layout.rooms[place], quickest_tier(layout.rooms[place])
    if tier is None or layout.shared(place) or room.resident_usd_per_s[tier] < room.usd_per_s:
        return tier
    return None


def _up_s(layout: Layout, place: int) -> float:
    """From there until it is up, without its weights."""
    room, tier = layout.rooms[place], _tier(layout, place)
    return room.start_s if tier is None else room.wake_s[tier]
