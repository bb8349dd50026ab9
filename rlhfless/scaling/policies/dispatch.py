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
from rlhfless.scaling.plan import CheapestUnderDeadline, Contract, FleetOptions, Plan, Responses, plan, responses
from rlhfless.scaling.policies.crew import Moment, awake
from rlhfless.scaling.policies.forecasters import Ahead, Floats
from rlhfless.scaling.policies.learned import Recent, Starts
from rlhfless.scaling.policies.limits import Limits, StepAim
from rlhfless.scaling.policies.offers import COLD, STARTING, WARM, Offers
from rlhfless.scaling.policies.outlook import ends_by, longest_response, rows_of
from rlhfless.scaling.policies.reserve import asleep_instead, gain_usd, is_due, wait_for
from rlhfless.scaling.policies.review import Dealt, Reviewer
from rlhfless.scaling.policy import StepView


def even_ranks(count: int) -> Floats:
    """[count]: the first terms of van der Corput's sequence, each in the middle of its share of 0 to 1."""
    bits = max(int(count - 1).bit_length(), 1)
    index, ranks = np.arange(count), np.zeros(count)
    for bit in range(bits):
        ranks += (index >> bit & 1) * 0.5 ** (bit + 1)
    return ranks + 0.5 ** (bits + 1)


def typical(ahead: Ahead, view: StepView, confidence: float) -> Responses:
    """The step as the planner is shown it. All samples of the step must be in `ahead`. All groups together end by the
    lengths that they are given with this probability."""
    if ahead.known:  # and so is which sibling is long
        return responses(ahead.means, view.group, view.prompt_tokens)
    by_mean = np.argsort(np.bincount(view.group, ahead.means) / np.bincount(view.group), kind="stable")
    rank = np.empty(by_mean.size, np.int64)
    rank[by_mean] = np.arange(by_mean.size)
    order = np.argsort(rank[view.group], kind="stable")
    ranks = np.empty(order.size)
    ranks[order] = even_ranks(order.size)
    step = responses(ahead.one_each(ranks), view.group, view.prompt_tokens)
    return replace(step, order=order, longest=ends_by(ahead, order, confidence))


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
    later: tuple[int, ...]
    """Places to start for later steps."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a step is planned for."""

    contract: Contract
    waiting_usd_per_s: float
    """What a second of it costs beside its actors."""
    after_s: float
    """What the contract was told that a step takes after generation."""
    steps_left: int
    """With this one."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What the planner was given."""

    step: Responses
    wanted: Contract
    asked: Asked
    confidence: float
    """That was asked of the forecasts in `step`."""
    reserve: float
    """By how many times less time than there is was given to it."""


CAUTION_STEP = 0.2
"""How closely the most cautious plan that is feasible is looked for: by three more plans."""


class StepPlanner:
    """State of one run."""

    def __init__(self, starts: Starts, limits: Limits) -> None:
        self.offers = Offers()
        self._starts = starts
        self._limits = limits
        self._margin = Recent(1.0)
        """By how much later than planned the outlook is confident that generation ends."""
        self._steps = 0

    def plan(self, now: Moment, ahead: Ahead, asked: Asked, reviewer: Reviewer) -> Made:
        """Plans the step, and says what counts in it."""
        waits = {place: self._wait(now, place) for place in now.layout.generation}
        options, behind = self.offers.options(now.view, now.layout, waits, len(waits))
        contract = asked.contract
        found, problem = self._safest(now, ahead, asked, options)
        dealt = deal(found, behind, problem.step)
        later = self._later(now, waits, found, dealt, problem)
        late = [place for place in later if now.layout.shared(place) and waits[place][1] > found.step_s]
        if late:
            dealt = wait_for(dealt, late, max(waits[place][1] for place in late) + now.view.fleet.load_s)
        board = reviewer.begin(now, ahead, dealt, problem.confidence)
        if not late:
            self._margin.add(board.last_s / found.step_s)
        limit_s = contract.deadline_s / problem.reserve if isinstance(contract, CheapestUnderDeadline) else math.inf
        ends_s = now.at_s + limit_s, now.at_s + max(limit_s, board.last_s)
        aim = StepAim(now.at_s, *ends_s, asked.after_s, found.time_usd_per_s)
        longest = None if ahead.known else longest_response(rows_of(ahead, now.view, dealt.home), now.places)
        self._limits.begin(aim, longest)
        return Made(found, dealt, later)

    def _safest(self, now: Moment, ahead: Ahead, asked: Asked, options: FleetOptions) -> tuple[Plan, Problem]:
        """The plan with the caution that the contract asks for; a deadline that cannot be kept with that is kept with
        the most there is."""

        def tried(share: float) -> tuple[Plan, Problem]:
            confidence, reserve = self._limits.caution(share)
            step, wanted = typical(ahead, now.view, confidence), self._sooner(asked.contract, reserve)
            found = plan(step, options, wanted, waiting_usd_per_s=asked.waiting_usd_per_s)
            return found, Problem(step, wanted, asked, confidence, reserve)

        if not isinstance(asked.contract, CheapestUnderDeadline):
            return tried(0.0)
        best = tried(1.0)
        if best[0].feasible:
            return best
        best, low, high = tried(0.0), 0.0, 1.0
        while best[0].feasible and high - low > CAUTION_STEP:
            middle = (low + high) / 2
            other = tried(middle)
            if other[0].feasible:
                best, low = other, middle
            else:
                high = middle
        return best

    def _sooner(self, contract: Contract, reserve: float) -> Contract:
        """What to ask of the planner: less time than there is, by the reserve and by what its ends are too early."""
        if not isinstance(contract, CheapestUnderDeadline):
            return contract
        return CheapestUnderDeadline(contract.deadline_s / reserve / max(self._margin.value, 1.0))

    def _later(
        self, now: Moment, waits: dict[int, tuple[str, float]], found: Plan, dealt: Dealt, problem: Problem
    ) -> tuple[int, ...]:
        """Places to start for later steps."""
        self._steps += 1
        spare = [place for place, (tier, _) in waits.items() if tier == COLD and place not in dealt.places]
        steps = problem.asked.steps_left - 1
        if not spare or steps == 0 or not is_due(self._steps - 1, found):
            return ()
        instead = asleep_instead(now.layout, waits, self._starts)
        richer, behind = self.offers.options(now.view, now.layout, instead, len(waits))
        other = plan(problem.step, richer, problem.wanted, waiting_usd_per_s=problem.asked.waiting_usd_per_s)
        chosen = tuple(place for place in deal(other, behind, problem.step).places if place in spare)
        price = sum(now.layout.rooms[place].usd_per_s * waits[place][1] for place in chosen)
        return chosen if gain_usd(found, other) * steps > price else ()

    def _wait(self, now: Moment, place: int) -> tuple[str, float]:
        """The tier that a place stands by in, and how long until it is up."""
        room, there = now.layout.rooms[place], now.view.places[place]
        if there.state is ReplicaState.STARTING:
            return STARTING, self._starts.left_s(place, room, now.at_s)
        if awake(there):
            return WARM, 0.0
        return there.tier or COLD, self._starts.wait_s(room, there.tier)
