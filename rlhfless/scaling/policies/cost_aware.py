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

from rlhfless.scaling.plan import CheapestUnderDeadline, Contract, FastestUnderBudget, contract_for_step
from rlhfless.scaling.policies.crew import (
    LayoutCache,
    Moment,
    awake,
    awake_beside,
    dealt_to_least,
    load,
    make_way,
    start,
)
from rlhfless.scaling.policies.dispatch import Asked, StepPlanner
from rlhfless.scaling.policies.forecasters import Forecaster
from rlhfless.scaling.policies.learned import Meter, Starts
from rlhfless.scaling.policies.limits import Limits
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
    Ints,
    Lost,
    Move,
    Note,
    Serving,
    Start,
    StepBegan,
    StepEnded,
    StepView,
)
from rlhfless.spec import FastestSpec, WeightedSpec

UNSEEN_SHARE = 0.5
"""Of the first step's contract, for generation: what comes after it was not seen yet, and takes about as much."""


class CostAware:
    """State of one run."""

    def __init__(self, settings: CostAwareSettings, forecaster: Forecaster) -> None:
        self._settings = settings
        self._forecaster = forecaster
        self._layouts = LayoutCache()
        self._starts = Starts()
        self._resting = Resting(self._starts)
        self._limits = Limits(settings.confidence)
        self._planner = StepPlanner(self._starts, self._limits)
        offers = self._planner.offers
        self._reviewer = Reviewer(forecaster, offers, self._resting, self._starts, self._limits)
        contracts = (settings.contract, *settings.step_contracts)
        self._meter = Meter(wanted=any(isinstance(contract, FastestSpec) for contract in contracts))
        self._crew: tuple[int, ...] = ()
        """Actors of the step's plan."""
        self._run_s: float | None = None
        self._steps = 0

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        now = Moment(at_s, view, self._layouts.of(view.fleet))
        self._meter.see(at_s, view, now.layout)
        actions = self._decide(now, event)
        self._starts.see(at_s, view, actions)
        return actions

    def _decide(self, now: Moment, event: Event) -> list[Action]:
        match event:
            case StepBegan():
                return self._begin(now)
            case Serving(place):
                self._reviewer.needed.discard(place)
                self._starts.up(place, now.layout.rooms[place], now.at_s, now.view.fleet.load_s)
            case Beat():
                return self._beat(now)
            case Lost(place, samples):
                return self._lost(now, place, samples)
            case Generated():
                self._forecaster.end(now.view)
                self._limits.learn(now.at_s, now.view)
                return self._resting.generated(now, self._crew)
            case Idle(place):
                return self._resting.idle(now, place)
            case StepEnded(_, end_s):
                self._resting.step_ended(now.view.step, end_s)
        return []

    def _begin(self, now: Moment) -> list[Action]:
        view = now.view
        self._meter.begin()
        actions = self._resting.began(now)
        self._forecaster.begin(view)
        ahead = self._forecaster.look(view)
        self._resting.tokens = float(ahead.means.sum()) + float(view.prompt_tokens[view.group].sum())
        made = self._planner.plan(now, ahead, self._asked(now), self._reviewer)
        self._steps += 1
        self._crew, self._reviewer.needed = made.dealt.places, set(made.later)
        actions.append(Note(made.found.record(view.step, now.at_s)))
        for place in now.layout.generation:
            if place not in self._crew and awake(view.places[place]):
                actions += self._resting.release(now, place, self._resting.rest(now, place))
        actions += make_way(view, now.layout, self._crew)
        actions += start(view, dict.fromkeys((*self._crew, *made.later)))
        return [*actions, *(Assign(*given) for given in zip(self._crew, made.dealt.samples, strict=True))]

    def _asked(self, now: Moment) -> Asked:
        self._run_s = now.at_s if self._run_s is None else self._run_s
        steps_left = max(self._settings.steps - self._steps, 1)
        spec = self._settings.contract_of(self._steps)
        shared_by = 1 if isinstance(spec, WeightedSpec) or spec.per == "step" else steps_left
        self._limits.share(shared_by, revisits=self._forecaster.revisits(now.view))
        after_s = self._resting.after_at_s(self._limits.confidence)
        contract = contract_for_step(
            spec,
            steps_left=steps_left,
            spent_s=now.at_s - self._run_s,
            spent_usd=self._meter.usd,
            other_s=after_s,
            other_usd=self._meter.others_usd.value,
        )
        if self._steps == 0:
            contract = _unseen(contract)
        return Asked(contract, self._resting.waiting_usd_per_s(now), after_s, steps_left)

    def _beat(self, now: Moment) -> list[Action]:
        actions = self._resting.look(now)
        loads = load(now.view)
        if self._reviewer.due(now):
            for action in self._reviewer.review(now):
                actions.append(action)
                if isinstance(action, Move):
                    loads[action.source] -= action.samples.size
                    loads[action.target] += action.samples.size
        for place in now.layout.generation:
            if loads[place] == 0 and awake(now.view.places[place]) and place not in self._reviewer.needed:
                actions += self._resting.release(now, place, self._resting.rest(now, place))
        return actions

    def _lost(self, now: Moment, place: int, samples: Ints) -> list[Action]:
        """Whoever is awake takes them, until the next beat looks at all again; if nobody is, the place starts anew."""
        self._starts.forget(place)
        self._reviewer.needed.discard(place)
        self._reviewer.hurry()
        alive = awake_beside(now.view, now.layout, place)
        again: list[Action] = []
        if samples.size and not alive:
            again = [*make_way(now.view, now.layout, [place]), Start(place)]
        return [*again, *(dealt_to_least(samples, alive or [place], load(now.view)) if samples.size else ())]


def _unseen(contract: Contract) -> Contract:
    """Of the first step, for its generation."""
    match contract:
        case CheapestUnderDeadline(deadline_s):
            return CheapestUnderDeadline(UNSEEN_SHARE * deadline_s)
        case FastestUnderBudget(budget_usd):
            return FastestUnderBudget(UNSEEN_SHARE * budget_usd)
    return contract
