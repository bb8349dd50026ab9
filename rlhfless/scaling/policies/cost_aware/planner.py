"""The plan of a step under uncertain lengths: which actors work, and which samples each one gets. Pure.

The planner takes one length per sample. Mean lengths would leave out long samples, which decide when an actor ends; a
high quantile of each would count all samples as long. So each sample is given a length at a rank of its own, and the
ranks of any stretch of the list are spread evenly over 0 to 1 (van der Corput's sequence): a group of n samples looks
like a typical draw of n, with its long ones, and the planner's closed form is right for it. The list is sorted by
prompts' means, and siblings are not told apart.

A deadline is earlier for the planner, by the step's reserve (`deadline`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfless.scaling.plan import CheapestUnderDeadline, Contract, Plan, Responses, plan, responses
from rlhfless.scaling.plan.planner import ROUNDING
from rlhfless.scaling.policies.cost_aware.deadline import EVEN
from rlhfless.scaling.policies.cost_aware.estimators import StartTimes
from rlhfless.scaling.policies.cost_aware.forecasters import Floats, RemainingLengths
from rlhfless.scaling.policies.cost_aware.idle import waiting_usd_per_s
from rlhfless.scaling.policies.fleet_actions import samples_by_prompt
from rlhfless.scaling.policies.fleet_layout import PolicyContext
from rlhfless.scaling.policies.fleet_options import FleetOptionsCache
from rlhfless.scaling.policy import Ints, StepView

SIMILAR_MEAN = 1.25
"""Prompts whose forecasts differ by less than this factor may change places in the sorted list, for the sake of common
prefixes: forecasts of single prompts are off by more."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's plan, on slots."""

    plan: Plan
    slots: tuple[int, ...]  # [actors]
    samples: tuple[Ints, ...]  # [actors]: in the order in which they go to the engine
    limit_s: float
    """Seconds from now until generation should have ended."""

    @property
    def hurries(self) -> bool:
        """Whether it is the fastest plan only because no plan keeps the limit."""
        return self.plan.step_s > self.limit_s * (1 + ROUNDING)


def plan_step(
    now: PolicyContext,
    lengths: RemainingLengths,
    contract: Contract,
    reserve: float,
    fleet_options: FleetOptionsCache,
    starts: StartTimes,
    between_usd: Callable[[int], float],
) -> StepPlan:
    """Options -> the plan that keeps the contract, with a reserve of time if it is a deadline -> samples to slots. If a
    deadline can be kept, but not with the reserve, that is the fastest plan."""
    standby = {slot: starts.standby(now, slot) for slot in now.layout.generation}
    options, behind = fleet_options.options(now, standby, between_usd)
    step, limit_s, waiting = typical(lengths, now.view), math.inf, waiting_usd_per_s(now)
    deadline_s = limit_s
    if isinstance(contract, CheapestUnderDeadline):
        deadline_s, limit_s = contract.deadline_s, contract.deadline_s / reserve
        contract = CheapestUnderDeadline(limit_s)
    chosen = plan(step, options, contract, waiting_usd_per_s=waiting)
    if not chosen.feasible and chosen.step_s <= deadline_s < math.inf:  # with less of a reserve it is kept
        chosen = plan(step, options, CheapestUnderDeadline(chosen.step_s), waiting_usd_per_s=waiting)
    return StepPlan(chosen, *assign(chosen, behind, step), limit_s)


def typical(lengths: RemainingLengths, view: StepView) -> Responses:
    """The step as the planner sees it. All samples of the step must be in `lengths`. All groups end by the lengths that
    they are given as likely as not."""
    if lengths.known:  # then it is also known which sibling is long
        return responses(lengths.means, view.group, view.prompt_tokens, view.prefixes)
    by_mean = _by_mean(view, np.bincount(view.group, lengths.means) / np.bincount(view.group))
    order = samples_by_prompt(by_mean, view.group)
    step = responses(lengths.typical_draw(order), view.group, view.prompt_tokens, view.prefixes)
    return replace(step, order=order, longest=_longest(lengths, order))


def _longest(lengths: RemainingLengths, order: Ints) -> Floats:
    """[rows]: the length of a group that ends at a row of the list `order` [rows], such that all groups of the list
    have ended by theirs as likely as not. Each sample may take longer with the same small probability, so a group's
    length depends on its samples, not on their number; and no group is longer than all samples together."""
    each = lengths.at(np.array([EVEN ** (1 / order.size)]))[:, 0]
    grid = lengths.grid()
    together = lengths.crossing(grid, lengths.unended(grid)[lengths.kind].sum(axis=0), EVEN)
    return np.asarray(np.minimum(np.sort(each[lengths.kind[order]]), together))


def _by_mean(view: StepView, means: Floats) -> Ints:
    """The prompts, ascending by `means` [prompts]; among similar ones, prompts with a common prefix side by side. An
    actor's group is a stretch of this list, so that it computes few prefixes."""
    if view.prefixes is None or not len(view.prefixes):
        return np.argsort(means, kind="stable")
    level = np.floor(np.log(np.maximum(means, 1.0)) / math.log(SIMILAR_MEAN))
    order: Ints = np.lexsort((means, view.prefixes.ranks, level))
    return order


def assign(
    chosen: Plan, behind: Mapping[tuple[str, str], Sequence[int]], step: Responses
) -> tuple[tuple[int, ...], tuple[Ints, ...]]:
    """The slots of a plan's actors, in their order, behind each (kind, tier); and the samples of each: the longest
    first, samples with equal forecasts beside their siblings."""
    free = {key: iter(slots) for key, slots in behind.items()}
    slots = tuple(next(free[actor.kind, actor.tier]) for actor in chosen.actors)
    if step.order is None:
        return slots, tuple(actor.samples for actor in chosen.actors)
    position = np.empty(step.tokens.size, np.int64)
    position[step.order] = np.arange(step.tokens.size)
    return slots, tuple(step.order[np.sort(position[actor.samples])[::-1]] for actor in chosen.actors)
