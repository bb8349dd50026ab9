"""The plan of one step's generation: how many actors, of which kind, and which samples each one gets. Pure.

    list      the samples from short to long (`responses`), and the time of any stretch of it on one actor (`cost`)
    cut       under a time limit each actor in turn takes as many of the longest samples that are left as it can end
              within it; the least cost under a limit does not rise with the limit
    frontier  the cuts under limits from that of the fastest plan to that of the cheapest
    choice    the one of them that the contract asks for, once more among limits around it

If a(B) is a straight line and the actors are alike, the cut is the cheapest partition under its limit: the time of a
group is `at_zero x its longest length` plus a sum over its samples, which no partition can change. By induction the
k-th group begins no later in the list than that of any other feasible partition, so each next group's longest length is
least, and so is the number of groups. The same induction makes the least feasible limit the least possible step time,
for any a(B). Where a(B) bends, tests hold the cost against an exact dynamic programme. docs/plan.md has more.

Deterministic: the same responses, options and contract give the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlhfless.scaling.plan import kernel
from rlhfless.scaling.plan.contract import CheapestUnderDeadline, Contract, FastestUnderBudget
from rlhfless.scaling.plan.cost import GroupTimes
from rlhfless.scaling.plan.options import DeviceOption, FleetOptions, Standby
from rlhfless.scaling.plan.responses import Floats, Ints, Responses, order_of
from rlhfless.scaling.plan.step_plan import ActorPlan, Plan

RESOLUTION = 1.004
"""Two limits this close (0.4 percent) count as equal: a plan may miss the optimum by one percent."""

ROUNDING = 1e-9
"""Share of a limit by which an end that was added up from its parts may be later."""

LIMITS = 32
"""Limits of the frontier: of a cluster of 64 devices 14 percent apart."""

REFINED = 3
"""So many of the best plans of the frontier are tried again at the least limit at which their actors suffice: that is
where each number of actors is at its best."""


def plan(step: Responses, options: FleetOptions, contract: Contract, *, waiting_usd_per_s: float = 0.0) -> Plan:
    """Plans a step. An infeasible contract gives the nearest plan, and says so.

    `waiting_usd_per_s` is the cost of a second of the step in addition to its actors. Under a deadline the plan may
    therefore end before it; under weights it is added to the value of a second; a budget pays for it, too.

    Raises CapacityError if one response alone exceeds the KV cache of a device on offer.
    """
    search = Search(step, options)
    fast, cheap = search.fastest, search.within(math.inf)
    assert cheap is not None  # without a limit one actor does all
    time_usd_per_s = 0.0

    def total_usd(cut: Cut) -> float:
        return cut.usd + waiting_usd_per_s * cut.step_s

    match contract:
        case CheapestUnderDeadline(deadline_s):
            time_usd_per_s = waiting_usd_per_s
            search.within(deadline_s)
            chosen = search.best(total_usd, lambda cut: cut.step_s <= deadline_s)
        case FastestUnderBudget(budget_usd):
            chosen = search.best(lambda cut: cut.step_s, lambda cut: total_usd(cut) <= budget_usd)
            time_usd_per_s = waiting_usd_per_s if chosen is None else search.saving_of_slower(chosen)
        case _:
            weight = contract.time_weight
            # Where devices cost nothing more while they are held, a plan can save nothing but time.
            only_time = weight == 1 or (cheap.usd == 0 and waiting_usd_per_s > 0)
            time_usd_per_s = (
                math.inf if only_time else weight / (1 - weight) * cheap.usd / fast.step_s + waiting_usd_per_s
            )
            chosen = (
                fast if only_time else search.best(lambda cut: cut.usd + time_usd_per_s * cut.step_s, lambda _: True)
            )
    nearest = fast if isinstance(contract, CheapestUnderDeadline) else search.best(total_usd, lambda _: True)
    assert nearest is not None
    cut = chosen or nearest
    reason = search.reason(cut)
    if chosen is None:
        costs = f"costs less than {total_usd(cut):.6g} USD"
        what = f"ends before {cut.step_s:.6g} s" if isinstance(contract, CheapestUnderDeadline) else costs
        reason = f"no plan on these devices {what}, so not {contract}; {reason}"
    waiting_usd = waiting_usd_per_s * cut.step_s
    return Plan(
        contract, chosen is not None, search.actors(cut), cut.step_s, cut.usd, waiting_usd, reason, time_usd_per_s
    )


@dataclass(frozen=True, slots=True)
class TierActors:
    """The actors of one kind in one tier, with the times of all groups on them."""

    device: DeviceOption
    standby: Standby
    ready_s: float
    """From the start of the step until the new weights are loaded."""
    times: GroupTimes
    stop: int
    """The position in the list at which they stop."""


@dataclass(frozen=True, slots=True)
class Cut:
    """All samples of the list, each on one actor; the longest samples first."""

    begins: Ints
    """[groups]: each ends where the one before begins, the first one at the end of the list."""
    ends_s: Floats  # [groups]
    tiers: tuple[TierActors, ...]  # [groups]
    step_s: float
    usd: float


class Search:
    """The plans of one step on one fleet. Limits that were tried are remembered."""

    def __init__(self, step: Responses, options: FleetOptions) -> None:
        self._order = order_of(step)
        self._max_actors = options.max_actors
        self._ways = [tuple(way) for way in _ways(step, options, self._order)]
        self._tried: dict[float, Cut | None] = {}
        """By limit; None if it cannot be kept."""

    def within(self, limit_s: float) -> Cut | None:
        """The cheapest cut under a limit, or None if there is none."""
        if limit_s not in self._tried:
            cuts = (self._cut(way, limit_s) for way in self._ways)
            self._tried[limit_s] = min((cut for cut in cuts if cut is not None), key=_cheaper, default=None)
        return self._tried[limit_s]

    @property
    def _cuts(self) -> list[Cut]:
        """The plans so far."""
        return [cut for cut in self._tried.values() if cut is not None]

    @cached_property
    def fastest(self) -> Cut:
        """The plan that ends first."""
        best = self.within(math.inf)
        assert best is not None
        count = self._order.size
        low_s = min(tier.ready_s + tier.times.one_s(count - 1, count) for way in self._ways for tier in way)
        low_s = max(low_s / RESOLUTION, best.step_s / self._max_actors / RESOLUTION)
        while low_s * RESOLUTION < best.step_s:
            middle_s = math.sqrt(low_s * best.step_s)
            if (cut := self.within(middle_s)) is None:
                low_s = middle_s
            else:
                best = cut
        return best

    def best(self, value: Callable[[Cut], float], kept: Callable[[Cut], bool]) -> Cut | None:
        """The plan with the least value among those that keep a contract, or None if none does."""
        fast, cheap = self.fastest, self.within(math.inf)
        assert cheap is not None
        for limit_s in np.geomspace(fast.step_s, max(cheap.step_s, fast.step_s), LIMITS).tolist():
            self.within(limit_s)
        by_count = {len(cut.tiers): cut for cut in self._by_value(value, kept)[::-1]}
        candidates = sorted(by_count.values(), key=value)[:REFINED]
        for cut in [*candidates, *self._with_more(candidates[0] if candidates else cheap)]:
            self._tighten(cut)
        return next(iter(self._by_value(value, kept)), None)

    def _tighten(self, cut: Cut) -> None:
        """Tries limits down to the least at which the actors of a plan suffice."""
        low_s, high_s = max((other.step_s for other in self._with_more(cut)), default=0.0), cut.step_s
        low_s = max(low_s, self.fastest.step_s)
        while low_s * RESOLUTION < high_s:
            middle_s = math.sqrt(low_s * high_s)
            tried = self.within(middle_s)
            if tried is None or len(tried.tiers) > len(cut.tiers):
                low_s = middle_s
            else:
                high_s = tried.step_s

    def _with_more(self, cut: Cut) -> list[Cut]:
        """The slowest faster plan with more actors, if there is one."""
        more = [other for other in self._cuts if len(other.tiers) > len(cut.tiers) and other.step_s < cut.step_s]
        return sorted(more, key=lambda other: other.step_s)[-1:]

    def _by_value(self, value: Callable[[Cut], float], kept: Callable[[Cut], bool]) -> list[Cut]:
        """The plans so far that keep a contract, the least value first."""
        return sorted(filter(kept, self._cuts), key=lambda cut: (value(cut), *_cheaper(cut)))

    def saving_of_slower(self, chosen: Cut) -> float:
        """The price of a second at a plan that spends its budget: the most that a slower plan saves for each second
        more. Infinite if the budget would pay for a faster plan, were there one."""
        if chosen.step_s <= self.fastest.step_s * RESOLUTION:
            return math.inf
        slower = [cut for cut in self._cuts if cut.step_s > chosen.step_s * RESOLUTION]
        savings = [(chosen.usd - cut.usd) / (cut.step_s - chosen.step_s) for cut in slower]
        return max([0.0, *savings])

    def reason(self, chosen: Cut) -> str:
        """A plan in a line, beside the next faster one with more actors."""
        usd = f"${chosen.usd:.3g}" if chosen.usd else "no extra cost"
        text = f"{len(chosen.tiers)} actors: {chosen.step_s:.3g} s, {usd}"
        faster = [c for c in self._cuts if c.step_s < chosen.step_s / RESOLUTION and len(c.tiers) > len(chosen.tiers)]
        if not faster:
            return f"{text}; more would save no time"
        other = min(faster, key=lambda cut: (len(cut.tiers), cut.step_s))
        saved_s, more_usd = chosen.step_s - other.step_s, other.usd - chosen.usd
        more = f"for ${more_usd:.2g}" if more_usd else "at no extra cost"
        return f"{text}; {len(other.tiers)} would save {saved_s:.2g} s {more}"

    def actors(self, cut: Cut) -> tuple[ActorPlan, ...]:
        """The actors of a cut, with the samples of each."""
        ends = (self._order.size, *cut.begins.tolist())
        return tuple(
            ActorPlan(
                tier.device.kind,
                tier.standby.tier,
                self._order[begin:end][::-1].copy(),
                tier.ready_s,
                end_s,
                end_s * tier.device.usd_per_s + tier.device.between_usd,
            )
            for begin, end, tier, end_s in zip(cut.begins.tolist(), ends, cut.tiers, cut.ends_s.tolist(), strict=False)
        )

    def _cut(self, way: tuple[TierActors, ...], limit_s: float) -> Cut | None:
        """One pass from the long end; None if the actors do not suffice."""
        begins, ends_s = np.empty(self._max_actors, np.int64), np.empty(self._max_actors)
        end, tiers = self._order.size, list[TierActors]()
        for tier in way:
            done, most = len(tiers), min(tier.standby.actors, self._max_actors - len(tiers))
            limits = limit_s - tier.ready_s, tier.stop, most
            first = end
            took, end = kernel.take(tier.times.table, *limits, end, begins[done:], ends_s[done:])
            groups = slice(done, done + took)
            ends_s[groups] = tier.ready_s + tier.times.with_last_piece_s(begins[groups], first, ends_s[groups])
            tiers += [tier] * took
            if end == 0:
                ends_s = ends_s[: len(tiers)]
                if ends_s.max() > limit_s * (1 + ROUNDING):  # the last prompts come too late
                    return None
                usd = float(ends_s @ [each.device.usd_per_s for each in tiers])
                usd += math.fsum(each.device.between_usd for each in tiers)
                return Cut(begins[: len(tiers)], ends_s, tuple(tiers), float(ends_s.max()), usd)
        return None


def _cheaper(cut: Cut) -> tuple[float, float, int]:
    return cut.usd, cut.step_s, len(cut.tiers)


def _ways(step: Responses, options: FleetOptions, order: Ints) -> Iterable[list[TierActors]]:
    """The orders in which kinds take from the list, each kind with its soonest actors first."""
    times = {
        index: GroupTimes(device, step, order, options.prefill)
        for index, device in enumerate(options.devices)
        if device.actors
    }
    for way in orders(options, order.size):
        yield [
            TierActors(options.devices[index], standby, standby.wait_s + options.weight_sync_s, times[index], stop)
            for index, stop in way
            for standby in options.devices[index].ready
        ]


def orders(options: FleetOptions, samples: int) -> list[tuple[tuple[int, int], ...]]:
    """Which kinds take the list from its long end on: (index of the device, where in the list it stops).

    One kind alone; two kinds, where the first stops after 1, 4, 16, ... of the longest samples or when all its actors
    have work; and all kinds, dearest or cheapest first, so that a fleet of many small kinds is used in full if it
    must be.
    """
    present = [index for index, device in enumerate(options.devices) if device.actors]
    stops = [0, *(samples - 4**power for power in range(samples.bit_length()) if 4**power < samples)]
    permutations: list[tuple[tuple[int, int], ...]] = [((index, 0),) for index in present]
    for first, then in itertools.permutations(present, 2):
        permutations += [((first, stop), (then, 0)) for stop in stops]
    if len(present) > 2:
        by_price = sorted(present, key=lambda index: (options.devices[index].usd_per_s, index))
        permutations += [tuple((index, 0) for index in way) for way in (by_price, by_price[::-1])]
    return permutations
