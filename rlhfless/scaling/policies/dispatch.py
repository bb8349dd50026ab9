"""The plan of a step under uncertain lengths: who draws what. Pure.

The planner takes one length per sample. A sample's mean would leave out the long ones, which decide when an actor ends;
a high quantile of each would count all as long. So each sample is given a length at a rank of its own, and the ranks of
any stretch of the list are spread evenly over 0 to 1 (van der Corput's sequence): a group of n of them looks like a
typical draw of n, with its long ones, and the planner's closed form is right for it. The list is sorted by prompts'
means, and siblings are not told apart.

Of a deadline the planner is given less than there is: as much less as its own end is before the one that the outlook
is confident of. That share is learned from step to step; a plan that is not safe even so is made once more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from rlhfless.records import ReplicaState
from rlhfless.scaling.lengths.forecast import mean_weights
from rlhfless.scaling.plan import CheapestUnderDeadline, Contract, Plan, Responses, plan, responses
from rlhfless.scaling.policies.crew import Layout, awake
from rlhfless.scaling.policies.forecasters import Ahead, Floats
from rlhfless.scaling.policies.learned import Recent, Starts
from rlhfless.scaling.policies.offers import COLD, STARTING, WARM, Offers
from rlhfless.scaling.policies.outlook import longest
from rlhfless.scaling.policies.review import Dealt, Reviewer, StepAim
from rlhfless.scaling.policy import StepView


def even_ranks(count: int) -> Floats:
    """[count]: the first terms of van der Corput's sequence, each in the middle of its share of 0 to 1."""
    bits = max(int(count - 1).bit_length(), 1)
    index, ranks = np.arange(count), np.zeros(count)
    for bit in range(bits):
        ranks += (index >> bit & 1) * 0.5 ** (bit + 1)
    return ranks + 0.5 ** (bits + 1)


def typical(ahead: Ahead, view: StepView, confidence: float, sizes: Floats) -> Responses:
    """The step as the planner is shown it. All samples of the step must be in `ahead`.

    `sizes` [groups of the last plan, the shortest first] are shares of the samples: how large a group there will be,
    in each part of the list. All groups together end by the lengths that they are given with this probability.
    """
    if ahead.levels.size == 1:  # each length is known, and so is which sibling is long
        return responses(ahead.remaining_tokens[:, 0], view.group, view.prompt_tokens)
    means = ahead.remaining_tokens @ mean_weights(ahead.levels)
    siblings = np.bincount(view.group)
    by_mean = np.argsort(np.bincount(view.group, means) / siblings, kind="stable")
    rank = np.empty(by_mean.size, np.int64)
    rank[by_mean] = np.arange(by_mean.size)
    order = np.argsort(rank[view.group], kind="stable")
    ranks = np.empty(order.size)
    ranks[order] = even_ranks(order.size)
    part = np.searchsorted(np.cumsum(sizes), (np.arange(order.size) + 0.5) / order.size)
    size = np.ceil(sizes[np.minimum(part, sizes.size - 1)] * order.size).astype(np.int64)
    ends_by = longest(ahead, order, size, float(confidence ** (1 / sizes.size)))
    step = responses(ahead.one_each(ranks), view.group, view.prompt_tokens)
    return replace(step, order=order, longest=ends_by)


def deal(found: Plan, behind: dict[tuple[str, str], list[int]], step: Responses) -> Dealt:
    """Puts a plan's actors on the places behind each (kind, tier), in their order."""
    free = {key: iter(places) for key, places in behind.items()}
    places = tuple(next(free[actor.kind, actor.tier]) for actor in found.actors)
    home = np.empty(step.tokens.size, np.int64)
    position = np.arange(step.tokens.size)
    if step.order is not None:
        position[step.order] = np.arange(step.tokens.size)
    samples = []
    for place, actor in zip(places, found.actors, strict=True):
        home[actor.samples] = place
        # The longest first; of samples that cannot be told apart, siblings side by side.
        samples.append(actor.samples if step.order is None else np.sort(position[actor.samples])[::-1])
    if step.order is not None:
        samples = [step.order[positions] for positions in samples]
    return Dealt(places, tuple(actor.ready_s for actor in found.actors), tuple(samples), home)


@dataclass(frozen=True, slots=True)
class Made:
    """A step's plan, on places."""

    found: Plan
    dealt: Dealt


class StepPlanner:
    """State of one run."""

    def __init__(self, starts: Starts) -> None:
        self.offers = Offers()
        self._starts = starts
        self._margin = Recent(1.0)
        self._shares: Floats | None = None
        """Of the samples, by the groups of the last plan, the shortest first."""

    def plan(
        self,
        at_s: float,
        view: StepView,
        layout: Layout,
        ahead: Ahead,
        contract: Contract,
        waiting_usd_per_s: float,
        reviewer: Reviewer,
    ) -> Made:
        """Plans the step, and tells the reviewer what counts in it."""
        waits = {place: self._wait(place, layout, view, at_s) for place in layout.generation}
        options, behind = self.offers.options(view, layout, waits, len(waits))
        deadline = isinstance(contract, CheapestUnderDeadline)
        even = np.full(len(waits), 1 / len(waits))
        sizes = even if self._shares is None else self._shares
        step = typical(ahead, view, reviewer.level if deadline else 0.5, sizes)
        asked, margin = contract, self._margin.value
        for _ in range(2):
            if isinstance(contract, CheapestUnderDeadline):
                asked = CheapestUnderDeadline(contract.deadline_s / max(margin, 1.0))
            found = plan(step, options, asked, waiting_usd_per_s=waiting_usd_per_s)
            dealt = deal(found, behind, step)
            board = reviewer.begin(at_s, view, layout, ahead, dealt)
            margin = board.last_s / found.step_s
            if (
                not isinstance(contract, CheapestUnderDeadline)
                or board.last_s <= contract.deadline_s
                or not found.feasible
            ):
                break
        self._margin.add(margin)
        self._shares = np.array([samples.size / view.group.size for samples in dealt.samples[::-1]])
        limit_s = max(contract.deadline_s, board.last_s) if isinstance(contract, CheapestUnderDeadline) else math.inf
        reviewer.aim = StepAim(at_s + limit_s, found.time_usd_per_s)
        return Made(found, dealt)

    def _wait(self, place: int, layout: Layout, view: StepView, at_s: float) -> tuple[str, float]:
        """The tier that a place stands by in, and how long until it is up."""
        room, there = layout.rooms[place], view.places[place]
        if there.state is ReplicaState.STARTING:
            return STARTING, self._starts.left_s(place, room, at_s)
        if awake(there):
            return WARM, 0.0
        return there.tier or COLD, self._starts.wait_s(room, there.tier)
