"""The best plans between fastest and cheapest, as searches over one number: the time limit of the step.

The least cost under a limit does not rise with the limit. So the fastest plan, the fastest under a budget, and the
best under weights are all found by trying limits, each one pass of `groups.fill` per candidate.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np

from rlhfless.scaling.plan.cost import GroupTimes
from rlhfless.scaling.plan.groups import Candidate, Partition, TierActors, fill, heal, polish
from rlhfless.scaling.plan.options import FleetOptions, orders
from rlhfless.scaling.plan.responses import Ints, Responses, lists

RESOLUTION = 1.004
"""Two limits this close (0.4 percent) count as equal: a plan may miss the optimum by one percent."""

SHORTER = 0.8
"""If small batches are cheaper (a(B) / B rises), limits below the given limit are tried in steps of this ratio."""

OVERSHOOT = 2.0
"""After a limit has failed, this multiple of the seconds of work left over, divided by the actors, is added to it. More
than 1, because shorter groups work less efficiently: too small a step costs another pass, too large a step little."""

PROVEN = 1.008
"""A plan under weights is taken when it is proven that no limit gives one better by more than 0.8 percent."""


class Frontier:
    """The plans of one step on one fleet. Limits that were tried are remembered."""

    def __init__(self, step: Responses, options: FleetOptions) -> None:
        self.lists = lists(step)
        self._max_actors = options.max_actors
        self._merging_pays = all(device.curve.merging_pays for device in options.devices if device.actors)
        self._candidates = [
            candidate
            for listed, order in enumerate(self.lists)
            for candidate in _candidates(step, options, listed, order)
        ]
        self._tried: dict[float, Partition | float] = {}
        """By limit: the plan, or the seconds of work left over if there is none."""
        self._least_s = min(
            tier.ready_s + tier.times.one_s(candidate.samples - 1, candidate.samples)
            for candidate in self._candidates
            for tier in candidate.tiers
        )

    def under(self, limit_s: float) -> Partition | None:
        """The cheapest plan that ends within the limit, or None if there is none."""
        plan = self._pass(limit_s)
        if not isinstance(plan, Partition):
            return None
        best = plan
        while not self._merging_pays and isinstance(plan, Partition):
            best = min(best, plan, key=_cheaper)
            plan = self._pass(plan.step_s * SHORTER)
        return best

    def cheapest(self) -> Partition:
        """The cheapest plan of all."""
        best = self.under(math.inf)
        assert best is not None  # without a limit one actor does all
        return best

    def fastest(self) -> Partition:
        """The plan that ends first."""
        return self._least(lambda _: True)

    def fastest_for(self, budget_usd: float) -> Partition | None:
        """The plan that ends first among those within the budget, or None if the cheapest is not."""
        if self.cheapest().usd > budget_usd:
            return None
        plain = self._least(lambda plan: plan.usd <= budget_usd)
        polished = polish(plain, plain.step_s)
        # What polishing saves here can be spent on time nearby.
        within_usd = budget_usd * plain.usd / polished.usd if polished.usd else math.inf
        bold = self._least(lambda plan: plan.usd <= within_usd)
        if bold.step_s < plain.step_s and (better := polish(bold, bold.step_s)).usd <= budget_usd:
            return better
        return polished

    def weighted(self, usd_per_s: float, slowest: Partition | None = None) -> Partition:
        """The plan with the least of `usd_per_s x time + cost`, none slower than `slowest`; for an infinite price of
        time, the fastest.

        Between two tried limits a < b no plan is better than `usd_per_s a + cost under b`. The interval with the
        lowest such bound is halved until it cannot beat the best plan by more than `PROVEN`.
        """
        fast, cheap = self.fastest(), slowest or self.cheapest()
        if math.isinf(usd_per_s):
            return fast

        def value(plan: Partition) -> float:
            return usd_per_s * plan.step_s + plan.usd

        best = min(fast, cheap, key=value)
        intervals = [(usd_per_s * fast.step_s + cheap.usd, fast.step_s, cheap.step_s, cheap.usd)]
        while intervals:
            bound, low_s, high_s, least_usd = heapq.heappop(intervals)
            if value(best) <= bound * PROVEN:
                break
            if high_s <= low_s * RESOLUTION:
                continue
            middle_s = math.sqrt(low_s * high_s)
            heapq.heappush(intervals, (usd_per_s * middle_s + least_usd, middle_s, high_s, least_usd))
            plan = self.under(middle_s)
            if plan is not None:
                best = min(best, plan, key=value)
                heapq.heappush(intervals, (usd_per_s * low_s + plan.usd, low_s, plan.step_s, plan.usd))
        return best

    def settle(self, plan: Partition, limit_s: float) -> Partition:
        """The plan at no more cost within the limit: cuts polished, siblings together where that costs no more."""
        whole = fill(plan.candidate, limit_s, self._max_actors, together=True)
        best = min(whole, plan, key=_cheaper) if isinstance(whole, Partition) else plan
        return heal(polish(best, limit_s), limit_s)

    def _least(self, wanted: Callable[[Partition], bool]) -> Partition:
        """The plan under the least limit for which `wanted` is true; it must be true without a limit."""
        best, low_s = self.cheapest(), self._least_s
        guess_s = max(low_s, best.step_s / self._max_actors)
        while low_s * RESOLUTION < best.step_s:
            plan = self.under(guess_s)
            if plan is not None and wanted(plan):
                best = plan
            else:
                low_s = guess_s
            guess_s = min(math.sqrt(low_s * best.step_s), 2 * low_s)
            left_s = self._tried.get(low_s)
            if isinstance(left_s, float):  # a limit that fails by little is close to the least
                guess_s = min(guess_s, low_s * RESOLUTION + OVERSHOOT * left_s / self._max_actors)
        return best

    def _pass(self, limit_s: float) -> Partition | float:
        if limit_s not in self._tried:
            best, most_usd, left_s = None, math.inf, math.inf
            for candidate in self._candidates:
                plan = fill(candidate, limit_s, self._max_actors, most_usd=most_usd)
                if not isinstance(plan, Partition):
                    left_s = min(left_s, plan)
                elif best is None or _cheaper(plan) < _cheaper(best):
                    best, most_usd = plan, plan.usd
            self._tried[limit_s] = best or left_s
        return self._tried[limit_s]


def _cheaper(plan: Partition) -> tuple[float, float, int]:
    return plan.usd, plan.step_s, len(plan.tiers)


def _candidates(step: Responses, options: FleetOptions, listed: int, order: Ints) -> list[Candidate]:
    """One candidate per order in which the kinds of devices may take from the list."""
    prompt = step.prompt[order]
    cuts = np.concatenate(([True], prompt[1:] != prompt[:-1], [True]))
    places = np.where(cuts, np.arange(cuts.size), cuts.size)
    run_begins = np.minimum.accumulate(places[::-1])[::-1].astype(np.int64)
    times = [GroupTimes(device, step, order) if device.actors else None for device in options.devices]
    candidates = []
    for way in orders(options, order.size):
        tiers = [
            tier for index, stop in way for tier in _tier_actors(options, index, int(run_begins[stop]), times[index])
        ]
        candidates.append(Candidate(listed, order.size, tuple(tiers), run_begins))
    return candidates


def _tier_actors(options: FleetOptions, index: int, stop: int, times: GroupTimes | None) -> list[TierActors]:
    """The actors of a kind, the soonest first, tier by tier."""
    device, sync_s = options.devices[index], options.weight_sync_s
    if times is None:
        return []
    return [TierActors(device, tier, tier.actors, tier.wait_s + sync_s, times, stop) for tier in device.ready]
