"""The run's own scaler: plans a step from forecasts under the contract, and mends the plan while the step runs. Pure.

    step began   forecast -> typical draw -> plan under the step's contract -> longest first to the actors; who is
                 needed starts or wakes, who is not rests
    beat         an actor without samples rests at once. Now and then, when many samples have ended, all that is left
                 is forecast again, and actors are dissolved into others where that pays (`migration`)
    lost         what was there goes to those with the least; the next beat looks at all again
    generated    everybody rests until the next step, and starts ahead of it
    idle         a function beside generation rests, and starts ahead of its next use

To rest is to stay, to sleep in a tier, or to give the devices back, whichever costs least over the gap that the run has
seen (`rests`). Every decision is noted with what it was made from. docs/policies.md has the formulae.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhfless.scaling.plan import contract_for_step
from rlhfless.scaling.policies.crew import Layout, LayoutCache, awake, dealt_to_least, load, make_way, start
from rlhfless.scaling.policies.dispatch import StepPlanner
from rlhfless.scaling.policies.forecasters import Forecaster
from rlhfless.scaling.policies.learned import Meter, Starts
from rlhfless.scaling.policies.resting import Resting
from rlhfless.scaling.policies.review import Reviewer
from rlhfless.scaling.policies.settings import CostAwareSettings
from rlhfless.scaling.policy import (
    Action,
    Assign,
    Beat,
    Event,
    Generated,
    Idle,
    Lost,
    Move,
    Note,
    Serving,
    Start,
    StepBegan,
    StepEnded,
    StepView,
)
from rlhfless.spec import FastestSpec


class CostAware:
    """State of one run."""

    def __init__(self, settings: CostAwareSettings, forecaster: Forecaster) -> None:
        self._settings = settings
        self._forecaster = forecaster
        self._layouts = LayoutCache()
        self._starts = Starts()
        self._resting = Resting(self._starts)
        self._planner = StepPlanner(self._starts)
        self._reviewer = Reviewer(forecaster, self._planner.offers, self._resting, self._starts, settings.confidence)
        contracts = (settings.contract, *settings.step_contracts)
        self._meter = Meter(wanted=any(isinstance(contract, FastestSpec) for contract in contracts))
        self._crew: tuple[int, ...] = ()
        """Actors of the step's plan."""
        self._run_s: float | None = None
        self._steps = 0

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        layout = self._layouts.of(view.fleet)
        self._meter.see(at_s, view, layout)
        actions = self._decide(at_s, event, view, layout)
        self._starts.see(at_s, view, actions)
        return actions

    def _decide(self, at_s: float, event: Event, view: StepView, layout: Layout) -> list[Action]:
        match event:
            case StepBegan():
                return self._begin(at_s, view, layout)
            case Serving(place):
                self._starts.up(place, layout.rooms[place], at_s, view.fleet.load_s)
            case Beat():
                return self._beat(at_s, view, layout)
            case Lost(place, samples):
                self._starts.forget(place)
                self._reviewer.hurry()
                alive = [other for other in layout.generation if other != place and awake(view.places[other])]
                again: list[Action] = [] if alive else [Start(place)]
                return again + dealt_to_least(samples, alive or [place], load(view))
            case Generated():
                self._forecaster.end(view)
                self._reviewer.learn(view)
                return self._resting.generated(at_s, view, layout, self._crew)
            case Idle(place):
                return self._resting.idle(at_s, view, layout, place)
            case StepEnded(_, end_s):
                self._resting.step_ended(view.step, end_s)
        return []

    def _begin(self, at_s: float, view: StepView, layout: Layout) -> list[Action]:
        self._run_s = at_s if self._run_s is None else self._run_s
        self._meter.begin()
        actions = self._resting.began(at_s, view, layout)
        self._forecaster.begin(view)
        ahead = self._forecaster.look(view)
        self._resting.tokens = ahead.mean_tokens + float(view.prompt_tokens[view.group].sum())
        contract = contract_for_step(
            self._settings.contract_of(self._steps),
            steps_left=max(self._settings.steps - self._steps, 1),
            spent_s=at_s - self._run_s,
            spent_usd=self._meter.usd,
            other_s=self._resting.after_at_s(self._settings.confidence),
            other_usd=self._meter.others_usd.value,
        )
        waiting = self._resting.waiting_usd_per_s(view, layout)
        made = self._planner.plan(at_s, view, layout, ahead, contract, waiting, self._reviewer)
        self._steps += 1
        self._crew = made.dealt.places
        actions.append(Note(made.found.record(view.step, at_s)))
        for place in layout.generation:
            if place not in self._crew and awake(view.places[place]):
                rest = self._resting.rest(at_s, view, layout, place)
                actions += self._resting.release(at_s, view, place, rest)
        actions += make_way(view, layout, self._crew)
        actions += start(view, self._crew)
        return [*actions, *(Assign(*given) for given in zip(self._crew, made.dealt.samples, strict=True))]

    def _beat(self, at_s: float, view: StepView, layout: Layout) -> list[Action]:
        actions = self._resting.look(at_s, view, layout)
        moved: set[int] = set()
        left = int(view.finished.size - np.count_nonzero(view.finished))
        if self._reviewer.due(at_s, left):
            moves = self._reviewer.review(at_s, view, layout)
            moved = {action.source for action in moves if isinstance(action, Move)}
            actions += moves
        loads = load(view)
        for place in layout.generation:
            if (loads[place] == 0 or place in moved) and awake(view.places[place]):
                rest = self._resting.rest(at_s, view, layout, place)
                actions += self._resting.release(at_s, view, place, rest)
        return actions
