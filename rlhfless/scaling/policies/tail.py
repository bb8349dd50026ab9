"""RLHFuse's fusion of generation with the stages behind it (arXiv 2409.13221, section 4). Pure.

Generation begins as on a static fleet. Once only a tail of the samples is left, they are all moved, once a step, to the
fewest actors that can take them, and the devices of the others are free for scoring and reference, which begin on what
is complete. The actors that keep most of the tail already are the ones that take it.

How few: none of them may get more sequences than it decodes about as fast as one, nor more than its KV memory holds if
all of them grow to the longest response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlhfless.records import Decision
from rlhfless.scaling.policies.crew import (
    Inputs,
    Layout,
    LayoutCache,
    awake,
    groups_dealt,
    load,
    make_way,
    rescue,
    rest,
    retire,
    shares_to_least,
    start,
)
from rlhfless.scaling.policies.settings import TailSettings
from rlhfless.scaling.policy import (
    Action,
    Beat,
    EngineRoom,
    Event,
    Generated,
    Idle,
    Lost,
    Move,
    Note,
    StepBegan,
    StepView,
)

KNEE = 2.0
"""A batch of this many times the seconds of a single sequence is full: from there on an iteration spends more on its
sequences than on the weights that they share, and the tail would become longer by being moved together."""


class TailMigration:
    """State of one run."""

    def __init__(self, settings: TailSettings) -> None:
        self._settings = settings
        self._layouts = LayoutCache()
        self._together = False
        """The step's tail was moved already."""

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        layout = self._layouts.of(view.fleet)
        crew = layout.generation
        match event:
            case StepBegan():
                self._together = False
                return [*make_way(view, layout, crew), *start(view, crew), *groups_dealt(view, crew)]
            case Beat() if not self._together:
                left = int((~view.finished).sum())
                if left <= self._settings.tail_share * view.finished.size:
                    self._together = True
                    return self._gather(at_s, view, layout)
            case Lost(place, samples):
                return rescue(view, layout, place, samples)
            case Generated():
                return [rest(view, place) for place in crew if layout.shared(place) and awake(view.places[place])]
            case Idle(place) if layout.shared(place):
                return retire(view, place)
        return []

    def _gather(self, at_s: float, view: StepView, layout: Layout) -> list[Action]:
        """Moves the tail together and releases who is empty then."""
        loads = load(view)
        working = [place for place in layout.generation if loads[place] > 0]
        takers = _takers(view, layout, working)
        givers = [place for place in working if place not in takers]
        tail = [view.samples_at(place) for place in givers]
        moved = sum(samples.size for samples in tail)
        actions: list[Action] = []
        if moved:
            shares = shares_to_least(moved, loads[takers])
            target = np.repeat(takers, shares)
            begins = np.cumsum([0, *(samples.size for samples in tail)])
            with_kv = math.isfinite(view.fleet.kv_token_s)
            for giver, samples, begin in zip(givers, tail, begins, strict=False):
                goes = target[begin : begin + samples.size]
                actions += [Move(giver, int(to), samples[goes == to], with_kv) for to in np.unique(goes)]
        idle = [place for place in layout.generation if place not in takers and awake(view.places[place])]
        actions += [rest(view, place) for place in idle if layout.shared(place)]
        inputs: Inputs = {"left": int(loads.sum()), "moved": moved, "tail_share": self._settings.tail_share}
        return [*actions, Note(Decision(view.step, at_s, "migrate", f"{len(takers)} actors keep the tail", inputs))]


def _takers(view: StepView, layout: Layout, working: list[int]) -> list[int]:
    """The fewest actors that can take the tail, those with most of it first."""
    loads = load(view)
    order = sorted(working, key=lambda place: (-loads[place], place))
    left = ~view.finished
    most_tokens = float(view.prompt_tokens[view.group[left]].sum() + left.sum() * view.fleet.max_tokens)
    sequences, tokens = int(left.sum()), most_tokens
    for count, place in enumerate(order, 1):
        engine = layout.rooms[place].engine
        assert engine is not None  # of a room for generation
        sequences -= _full_batch(engine)
        tokens -= engine.kv_capacity_tokens
        if sequences <= 0 and tokens <= 0:
            return order[:count]
    return order


def _full_batch(engine: EngineRoom) -> int:
    """The largest batch whose iteration takes at most `KNEE` times that of one sequence."""
    limit_s, low, high = KNEE * engine.model.iteration_s(1), 1, engine.max_sequences
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if engine.model.iteration_s(middle) <= limit_s else (low, middle - 1)
    return low
