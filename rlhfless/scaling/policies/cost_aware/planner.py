"""The plan of a step under uncertain lengths: which actors work, and which samples each one gets. Pure.

The planner takes one length per sample. Mean lengths would leave out long samples, which decide when an actor ends; a
high quantile of each would count all samples as long. So each sample is given a length at a rank of its own, and the
ranks of any stretch of the list are spread evenly over 0 to 1 (van der Corput's sequence): a group of n samples looks
like a typical draw of n, with its long ones, and the planner's closed form is right for it. The list is sorted by
prompts' means, and siblings are not told apart.

The planner is given an earlier deadline, by the step's margin (`deadline.StepMargin`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfless.scaling.plan import CheapestUnderDeadline, Contract, FleetOptions, Plan, Responses, plan, responses
from rlhfless.scaling.policies.cost_aware.deadline import StepMargin
from rlhfless.scaling.policies.cost_aware.estimators import StartTimes
from rlhfless.scaling.policies.cost_aware.forecasters import Floats, RemainingLengths, even_ranks
from rlhfless.scaling.policies.fleet_actions import samples_by_prompt
from rlhfless.scaling.policies.fleet_layout import PolicyContext
from rlhfless.scaling.policies.fleet_options import FleetOptionsCache
from rlhfless.scaling.policy import Ints, StepView

CAUTION_STEP = 0.2
"""Precision of the bisection for the most cautious feasible plan: three more plans."""

SIMILAR_MEAN = 1.25
"""Prompts whose forecasts differ by less than this factor may change places in the sorted list, for the sake of common
prefixes: forecasts of single prompts are off by more."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The goals and limits for which a step is planned."""

    contract: Contract
    margin: StepMargin
    waiting_usd_per_s: float
    """Cost of a second of the step in addition to its actors."""
    after_s: float
    """Predicted seconds of the step after generation, as the contract was computed with."""


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """The samples of each actor of a plan, on slots."""

    slots: tuple[int, ...]  # [actors]
    ready_s: tuple[float, ...]  # [actors]: from now until each can work
    samples: tuple[Ints, ...]  # [actors]: in the order in which they go to the engine
    home: Ints  # [samples]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's plan, on slots."""

    plan: Plan
    assignment: SlotAssignment
    limit_s: float
    """Seconds from now until generation should have ended."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan, and the inputs of the planner."""

    plan: Plan
    step: Responses
    contract: Contract
    confidence: float
    reserve: float


def plan_step(
    now: PolicyContext,
    lengths: RemainingLengths,
    request: PlanRequest,
    fleet_options: FleetOptionsCache,
    starts: StartTimes,
) -> StepPlan:
    """Options -> the most cautious plan that can be made -> samples to slots."""
    standby = {slot: starts.standby(now, slot) for slot in now.layout.generation}
    options, behind = fleet_options.options(now, standby)
    safest = _safest(now.view, lengths, request, options)
    assignment = assign(safest.plan, behind, safest.step)
    contract = request.contract
    limit_s = contract.deadline_s / safest.reserve if isinstance(contract, CheapestUnderDeadline) else math.inf
    return StepPlan(safest.plan, assignment, limit_s)


def _safest(view: StepView, lengths: RemainingLengths, request: PlanRequest, options: FleetOptions) -> Tried:
    """The plan with the caution that the contract asks for. If a deadline cannot be kept with that, the plan with the
    most caution that keeps it, found by bisection."""

    def tried(caution: float) -> Tried:
        confidence, reserve = request.margin.at(caution)
        step, contract = typical(lengths, view, confidence), request.margin.sooner(request.contract, reserve)
        chosen = plan(step, options, contract, waiting_usd_per_s=request.waiting_usd_per_s)
        return Tried(chosen, step, contract, confidence, reserve)

    if not isinstance(request.contract, CheapestUnderDeadline):
        return tried(0.0)
    best = tried(1.0)
    if best.plan.feasible:
        return best
    best, low, high = tried(0.0), 0.0, 1.0
    while best.plan.feasible and high - low > CAUTION_STEP:
        middle = (low + high) / 2
        other = tried(middle)
        if other.plan.feasible:
            best, low = other, middle
        else:
            high = middle
    return best


def typical(lengths: RemainingLengths, view: StepView, confidence: float) -> Responses:
    """The step as the planner sees it. All samples of the step must be in `lengths`. With probability `confidence` all
    groups end by the lengths that they are given."""
    if lengths.known:  # then it is also known which sibling is long
        return responses(lengths.means, view.group, view.prompt_tokens, view.prefixes)
    by_mean = _by_mean(view, np.bincount(view.group, lengths.means) / np.bincount(view.group))
    order = samples_by_prompt(by_mean, view.group)
    ranks = np.empty(order.size)
    ranks[order] = even_ranks(order.size)
    step = responses(lengths.one_each(ranks), view.group, view.prompt_tokens, view.prefixes)
    return replace(step, order=order, longest=_longest(lengths, order, confidence))


def _longest(lengths: RemainingLengths, order: Ints, confidence: float) -> Floats:
    """[rows]: the length of a group that ends at a row of the list `order` [rows], such that all groups of the list
    have ended by theirs with this probability. Each sample may take longer with the same small probability, so a
    group's length depends on its samples, not on their number; and no group is longer than all samples together."""
    each = lengths.at(np.array([confidence ** (1 / order.size)]))[:, 0]
    grid = lengths.grid()
    together = lengths.crossing(grid, lengths.unended(grid)[lengths.kind].sum(axis=0), confidence)
    return np.asarray(np.minimum(np.sort(each[lengths.kind[order]]), together))


def _by_mean(view: StepView, means: Floats) -> Ints:
    """The prompts, ascending by `means` [prompts]; among similar ones, prompts with a common prefix side by side. An
    actor's group is a stretch of this list, so that it computes few prefixes."""
    if view.prefixes is None or not len(view.prefixes):
        return np.argsort(means, kind="stable")
    level = np.floor(np.log(np.maximum(means, 1.0)) / math.log(SIMILAR_MEAN))
    order: Ints = np.lexsort((means, view.prefixes.ranks, level))
    return order


def assign(chosen: Plan, behind: Mapping[tuple[str, str], Sequence[int]], step: Responses) -> SlotAssignment:
    """Puts a plan's actors on the slots behind each (kind, tier), in their order."""
    free = {key: iter(slots) for key, slots in behind.items()}
    slots = tuple(next(free[actor.kind, actor.tier]) for actor in chosen.actors)
    home = np.empty(step.tokens.size, np.int64)
    position = np.arange(step.tokens.size)
    if step.order is not None:
        position[step.order] = np.arange(step.tokens.size)
    samples = []
    for slot, actor in zip(slots, chosen.actors, strict=True):
        home[actor.samples] = slot
        # The longest samples first; samples with equal forecasts keep siblings side by side.
        samples.append(actor.samples if step.order is None else step.order[np.sort(position[actor.samples])[::-1]])
    return SlotAssignment(slots, tuple(actor.ready_s for actor in chosen.actors), tuple(samples), home)
