"""The policy `cost_aware`, from event to actions. See the package docstring for its pipeline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rlhfless.scaling.policies.contract import (
    CheapestUnderDeadline,
    Contract,
    FastestUnderBudget,
    RunContract,
    Weighted,
    contract_for_step,
)
from rlhfless.scaling.policies.cost_aware.consolidate import actors_to_keep, give_to, leave_for
from rlhfless.scaling.policies.cost_aware.estimates import (
    DeadlineMargin,
    Recent,
    Spending,
    StartTimes,
    StepAim,
    StepMargin,
)
from rlhfless.scaling.policies.cost_aware.forecasts import Forecaster, RemainingLengths, typical_responses
from rlhfless.scaling.policies.cost_aware.group_times import ActorTypeCache, Responses
from rlhfless.scaling.policies.cost_aware.idle import (
    HeldDevices,
    IdleScheduler,
    StepForecast,
    release,
    waiting_usd_per_s,
)
from rlhfless.scaling.policies.cost_aware.plan import ROUNDING, FleetOptions, GenerationPlan, Standby, plan
from rlhfless.scaling.policies.cost_aware.rebalance import PASSED_SHARE, Actors, goal_of, is_due, rebalance_tail
from rlhfless.scaling.policies.fleet import Contexts, PolicyContext, assign_to_least, awake_beside, start
from rlhfless.scaling.policy import (
    UNASSIGNED,
    Action,
    Answered,
    Assign,
    Event,
    Generated,
    Heartbeat,
    Idle,
    Ints,
    Lost,
    Note,
    Serving,
    StepBegan,
    StepEnded,
    StepView,
)
from rlhfless.scaling.waits import Waits
from rlhfless.spec import FastestSpec, WeightedSpec
from rlhfless.spec.fleet import CostAwareSpec

UNSEEN_SHARE = 0.5
"""Share of a step's contract given to generation until the work after it is measured: it takes about as long."""


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The plan of a step, mapped to slots."""

    plan: GenerationPlan
    slots: tuple[int, ...]  # [actors]
    samples: tuple[Ints, ...]  # [actors]: in the order in which they are sent to the engine
    limit_s: float  # Seconds from now until generation should have ended

    @property
    def hurries(self) -> bool:
        """Return whether this is the fastest plan because no plan keeps the limit."""
        return self.plan.step_s > self.limit_s * (1 + ROUNDING)


class CostAware:
    """The policy for one run, with the run's state."""

    def __init__(self, settings: CostAwareSpec, run: RunContract, forecaster: Forecaster) -> None:
        self._run = run
        self._forecaster = forecaster
        self._contexts = Contexts()
        self._actor_types = ActorTypeCache()
        self._held = HeldDevices()
        self._starts = StartTimes(self._held.again_s)
        self._idle = IdleScheduler(self._starts, self._held)
        self._deadline = DeadlineMargin(settings.confidence)
        self._spending = Spending()
        self._since = 0.0, 0.0  # Start of the steps that share a limit, and the run's cost at that time
        self._steps = 0
        self._waits = Waits()
        self._wait_token_s = Recent()
        """Seconds for which the samples of a step wait for their environment, per token of theirs."""
        self._generating: set[int] = set()
        """Steps in generation. An actor that is idle in one step may have work in another."""
        # Of the step:
        self._actors: tuple[int, ...] = ()
        self._released: set[int] = set()
        """Slots of the step's actors that were released while samples were parked."""
        self._kept: tuple[int, ...] = ()
        """Slots of the actors that generate the rest of a step with an environment; empty before the first look."""
        self._aim = StepAim(self._deadline.of_step(1, revisits=False))
        self._forecast = StepForecast()

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        now = self._contexts.of(at_s, view)
        self._spending.add_until(now, self._starts, generating=bool(self._generating))
        self._held.note_held(now)
        actions = self._decide(now, event)
        self._starts.note_actions(now, actions)
        return actions

    def _decide(self, now: PolicyContext, event: Event) -> list[Action]:
        match event:
            case StepBegan():
                self._generating.add(now.view.step)
                return self._begin(now)
            case Serving(slot):
                self._starts.forget(slot)
            case Heartbeat():
                return self._heartbeat(now)
            case Lost(slot, samples):
                return self._lost(now, slot, samples)
            case Answered(samples, slots):
                return self._answered(now, samples, slots)
            case Generated():
                self._generating.discard(now.view.step)
                self._idle.note_first_group(now)  # all groups may have ended since the last heartbeat
                self._forecaster.end(now.view)
                if now.view.waited_s is not None:
                    self._wait_token_s.add(float(now.view.waited_s.sum() / max(now.view.tokens.sum(), 1)))
                self._deadline.learn(now.at_s, self._aim)
                self._forecast = StepForecast(now.tokens, now.at_s)
                return [] if self._generating else self._idle.end_generation(now, self._actors, self._forecast)
            case Idle(slot):
                return self._idle.end_work(now, slot, self._forecast)
            case StepEnded(_, end_s):
                self._generating.discard(now.view.step)  # without generation, because a resumed run had all samples
                self._idle.end_step(now.view.step, end_s)
        return []

    def _begin(self, now: PolicyContext) -> list[Action]:
        """Handle the start of a step: forecast, plan request, plan, goals of the step, actions."""
        self._spending.begin_step()
        actions = self._idle.begin_step(now)
        self._forecaster.begin(now.view)
        lengths = self._forecaster.look(now.view)
        tokens = float(lengths.means.sum()) + _prompt_tokens(now.view)
        margin, contract, after_s = self._request(now, tokens)
        plan_for = partial(self._plan, now, lengths, reserve=margin.reserve, tokens=tokens)
        made = plan_for(contract=contract)
        if self._steps == 0 and isinstance(contract, CheapestUnderDeadline) and made.hurries:
            # UNSEEN_SHARE is a guess; no plan should cost more because of it if the deadline itself is kept.
            deadline_s = contract.deadline_s / UNSEEN_SHARE
            even = plan_for(contract=Weighted(WeightedSpec().time_weight))
            if even.plan.step_s <= deadline_s:
                made = dataclasses.replace(even, limit_s=deadline_s)
        self._forecast = _forecast(now, tokens, made.plan.step_s)
        self._spending.note_plan(made.plan.usd + made.plan.waiting_usd)
        planned_s = now.at_s + made.plan.step_s
        limit_s = max(now.at_s + made.limit_s, planned_s)
        self._aim = StepAim(margin, now.at_s, limit_s, planned_s, after_s, made.plan.time_usd_per_s)
        self._idle.aim = self._aim
        self._steps += 1
        self._actors, self._released, self._kept = made.slots, set(), ()
        return [*actions, Note(made.plan.record(now.view.step, now.at_s)), *self._carried_out(now, made)]

    def _plan(
        self, now: PolicyContext, lengths: RemainingLengths, *, contract: Contract, reserve: float, tokens: float
    ) -> SlotPlan:
        """Plan the actors of a step of `tokens` tokens.

        A deadline is planned with a time reserve. If it can be kept only without the reserve, the plan is the fastest
        one.
        """
        slots, step = now.layout.generation, typical_responses(lengths, now.view)
        standby = {slot: self._starts.standby(now, slot) for slot in slots}
        by_tier: dict[str, list[int]] = {}
        for slot, (tier, _) in standby.items():
            by_tier.setdefault(tier, []).append(slot)
        tiers = (
            Standby(tier, len(waiting), max(0.0, *(standby[slot][1] for slot in waiting)))
            for tier, waiting in by_tier.items()
        )
        options = FleetOptions(
            self._actor_types.of(now.layout.replica_slots[slots[0]]),
            tuple(tiers),
            len(slots),
            now.view.fleet.load_s,
            self._wait_token_s.value,
            self._idle.between_usd(now, next(iter(standby)), tokens),
        )
        limit_s, deadline_s = math.inf, math.inf
        if isinstance(contract, CheapestUnderDeadline):
            deadline_s, limit_s = contract.deadline_s, contract.deadline_s / reserve
            contract = CheapestUnderDeadline(limit_s)
        waiting = waiting_usd_per_s(now)
        chosen = plan(step, options, contract, waiting_usd_per_s=waiting)
        if not chosen.feasible and chosen.step_s <= deadline_s < math.inf:  # feasible with a smaller reserve
            chosen = plan(step, options, CheapestUnderDeadline(chosen.step_s), waiting_usd_per_s=waiting)
        return SlotPlan(chosen, *_on_slots(chosen, by_tier, step), limit_s)

    def _request(self, now: PolicyContext, tokens: float) -> tuple[StepMargin, Contract, float]:
        """Return the margin of the step, its share of the contract, and the predicted seconds after generation."""
        if self._run.opens(self._steps) and self._steps < self._run.steps:
            self._since = now.at_s, self._spending.usd
        steps_left = self._run.steps_left(self._steps)
        spec = self._run.of_step(self._steps)
        shared_by = 1 if isinstance(spec, WeightedSpec) or spec.per == "step" else steps_left
        margin = self._deadline.of_step(shared_by, revisits=self._forecaster.revisits(now.view))
        after_s = self._idle.after_at_s(margin.confidence, tokens)
        contract = contract_for_step(
            spec,
            steps_left=steps_left,
            spent_s=now.at_s - self._since[0],
            spent_usd=self._spending.usd - self._since[1],
            other_s=after_s,
            other_usd=self._spending.after_usd.value,
        )
        seen = self._spending.after_usd.count > 0 if isinstance(spec, FastestSpec) else self._steps > 0
        share = 1.0 if seen else UNSEEN_SHARE
        match contract:
            case CheapestUnderDeadline(deadline_s):
                contract = CheapestUnderDeadline(share * deadline_s)
            case FastestUnderBudget(budget_usd):
                contract = FastestUnderBudget(share * budget_usd / self._spending.of_plan.value)
        return margin, contract, after_s

    def _carried_out(self, now: PolicyContext, made: SlotPlan) -> list[Action]:
        """Release unneeded actors, start needed ones, and assign samples."""
        self._idle.note_work(now, self._actors)
        actions: list[Action] = []
        for slot in now.layout.generation:
            if slot not in self._actors and now.awake(slot):
                actions += release(now, slot, self._idle.state_of(now, slot, self._forecast))
        actions += start(now, self._actors)
        return [*actions, *(Assign(*given) for given in zip(self._actors, made.samples, strict=True))]

    def _heartbeat(self, now: PolicyContext) -> list[Action]:
        self._idle.note_first_group(now)
        actions: list[Action] = []
        loads = now.loads
        self._waits.note(now.at_s, now.view)
        answer_s = self._waits.soonest_s(now.at_s)
        self._idle.note_work(now, np.flatnonzero(loads).tolist())
        if is_due(now, self._forecast) and loads.any():
            actors = self._actors_now(now)
            tokens = now.tokens + float(actors.means.sum())
            freed = self._idle.state_of(now, now.layout.generation[0], self._forecast).freed_usd_per_s > 0
            after_s = self._idle.after_at_s(self._aim.margin.confidence, tokens)
            goal = goal_of(now, self._aim, after_s, freed)
            if now.view.waited_s is not None:
                self._kept = actors_to_keep(now, actors, goal)
                actions = leave_for(now, actors, self._kept)
            if actions:
                actors.compute_ends(goal.confidence)
            else:
                actions = rebalance_tail(now, actors, goal)
            self._forecast = _forecast(now, tokens, max(actors.last()[1], self._waits.last_s(now.at_s)))
            loads = np.bincount(actors.home[actors.home != UNASSIGNED], minlength=now.slots)
        if self._generating != {now.view.step}:
            return actions
        for slot in now.layout.generation:
            if loads[slot] == 0 and now.awake(slot):
                wanted_s = answer_s if not self._kept or slot in self._kept else math.inf
                left = release(now, slot, self._idle.state_of(now, slot, self._forecast, wanted_s))
                actions += left
                self._released |= {slot} if left and wanted_s < math.inf else set()
        return [*actions, *self._idle.start_for(now, self._released, answer_s)] if answer_s < math.inf else actions

    def _answered(self, now: PolicyContext, samples: Ints, slots: Ints) -> list[Action]:
        """Let samples return to the actors they had, or those that are kept; if no actor is left, start these again."""
        self._waits.answered(now.at_s, now.view.step, samples)
        if kept := list(filter(now.awake, self._kept)):
            return give_to(now, samples, slots, kept)
        if any(map(now.awake, now.layout.generation)):
            return []
        again = np.unique(slots).tolist()
        return [*start(now, again), *(Assign(slot, samples[slots == slot]) for slot in again)]

    def _actors_now(self, now: PolicyContext) -> Actors:
        lengths = self._forecaster.look(now.view)
        slots = now.layout.generation
        actor_types = {slot: self._actor_types.of(now.layout.replica_slots[slot]) for slot in slots}
        return Actors(now, lengths, actor_types, self._starts, self._wait_token_s.value)

    def _lost(self, now: PolicyContext, slot: int, samples: Ints) -> list[Action]:
        """Assign the samples to awake actors until the next heartbeat replans; restart the slot if none is awake."""
        self._starts.forget(slot)
        self._forecast = dataclasses.replace(self._forecast, look_s=-math.inf)
        awake = awake_beside(now, slot)
        again: list[Action] = []
        if samples.size and not awake:
            again = start(now, [slot])
        return [*again, *assign_to_least(samples, awake or [slot], now.loads)]


def _forecast(now: PolicyContext, tokens: float, left_s: float) -> StepForecast:
    """Return the expected end of generation, and the time of the next look."""
    look_s = now.at_s + max(PASSED_SHARE * left_s, now.view.fleet.heartbeat_s)
    return StepForecast(tokens, now.at_s + left_s, now.left, look_s)


def _prompt_tokens(view: StepView) -> float:
    """Return the prompt tokens of the step, counted once per sample."""
    return float(view.prompt_tokens[view.group].sum())


def _on_slots(
    chosen: GenerationPlan, by_tier: Mapping[str, Sequence[int]], step: Responses
) -> tuple[tuple[int, ...], tuple[Ints, ...]]:
    """Return the slots of a plan's actors in order, and the samples of each.

    Samples are sorted longest first, those with equal forecasts next to their siblings.
    """
    free = {tier: iter(slots) for tier, slots in by_tier.items()}
    slots = tuple(next(free[actor.tier]) for actor in chosen.actors)
    if step.order is None:
        return slots, tuple(actor.samples for actor in chosen.actors)
    position = np.empty(step.tokens.size, np.int64)
    position[step.order] = np.arange(step.tokens.size)
    return slots, tuple(step.order[np.sort(position[actor.samples])[::-1]] for actor in chosen.actors)
