"""How many ranks the learner has: which devices fewer of them take, and which number a step should have. Pure.

A number is chosen between two steps, from the times of the last one. With n ranks in the place of m, learning takes
m / n of its time, and what other functions work on meanwhile hides as much of it as before. A change costs the seconds
of moving the state, spread over the steps that are left. After a fault nothing is weighed: the group goes on with the
most ranks whose devices are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhfless.records import Invocation, Work
from rlhfless.scaling.intervals import length, union
from rlhfless.scaling.placement import Allocation, Device, Placement, rank_devices
from rlhfless.scaling.plan.contract import CheapestUnderDeadline, Contract, FastestUnderBudget
from rlhfless.scaling.prices import PriceBook

LEARNER_RANKS = "learner_ranks"
"""Kind of the decisions about the number of ranks."""

_LEARNS = (Work.EVALUATE, Work.LEARN)


def allocations_with(placement: Placement, whole: Allocation, ranks: int, count: int) -> tuple[Allocation, ...]:
    """The allocations of `count` of the `ranks` ranks that have all of `whole`: neighbours, and the first is one of the
    last. Devices that are taken and given back together stay together, whatever ranks are on them, so allocations may
    be alike; each is returned once."""
    if count >= ranks:
        return (whole,)
    found: dict[tuple[str, ...], Allocation] = {}
    for first in range(ranks):
        of_ranks = [rank_devices(whole.devices, (first + each) % ranks, ranks) for each in range(count)]
        own = Allocation.of([device for devices in of_ranks for device in devices])
        taken = {device for group in placement.groups_of(own) for device in group.devices}
        pairs = [(device, share) for device, share in whole.shared if device in taken]
        devices, shares = zip(*pairs, strict=True)
        found.setdefault(
            tuple(device.name for device in devices), replace(whole, devices=devices, shares=shares, ranks=count)
        )
    return tuple(found.values())


def after_fault(
    candidates: Mapping[int, Sequence[Allocation]], at_hand: Callable[[Allocation], bool], below: int | None = None
) -> tuple[Allocation, str]:
    """The devices that a lost group goes on with, and why. `candidates`: the allocations by number of ranks. `below`: a
    group of so many ranks was lost again in the same step, so there should be fewer, if there may be."""
    fewer = [count for count in candidates if below is None or count < below] or [min(candidates)]
    for count in sorted(fewer, reverse=True):
        for allocation in candidates[count]:
            if at_hand(allocation):
                again = "" if below is None else f", fewer than the {below} that were lost twice in one step"
                return allocation, f"the most ranks whose devices are there{again}"
    return candidates[max(fewer)][0], "no devices are there, and the group waits for those of all its ranks"


@dataclass(frozen=True, slots=True)
class StepMeasured:
    """The last step, in seconds and US dollars per second."""

    ranks: int
    """Ranks of the learner in it."""
    step_s: float
    learn_s: float
    """Time in which the learner worked."""
    alone_s: float
    """The part of that in which no other function worked: what a change of the number changes first."""
    others_usd_per_s: float
    """The cost of all devices that are not the learner's, and the part of its own that goes on when they are given
    back, as where they are owned."""
    change_s: float
    """Expected time of a change."""
    steps_left: int

    def step_with(self, ranks: int, usd_per_s: Mapping[int, float]) -> tuple[float, float]:
        """Expected time and cost of each of the steps that are left, with so many ranks, which cost `usd_per_s`."""
        hidden_s = self.learn_s - self.alone_s
        step_s = self.step_s - self.alone_s + max(self.learn_s * self.ranks / ranks - hidden_s, 0.0)
        cost_usd = step_s * (self.others_usd_per_s + usd_per_s[ranks])
        if ranks != self.ranks:
            change_s = self.change_s / max(self.steps_left, 1)
            most_usd_per_s = max(usd_per_s[ranks], usd_per_s[self.ranks])
            step_s, cost_usd = step_s + change_s, cost_usd + change_s * (self.others_usd_per_s + most_usd_per_s)
        return step_s, cost_usd


def saved_usd_per_s(prices: PriceBook, allocation: Allocation) -> float:
    """US dollars per second that the release of an allocation saves."""
    return prices.usd_per_s(allocation.shared, "saved_usd_per_hour")


def released_usd_per_s(prices: PriceBook, devices: Iterable[Device]) -> float:
    """US dollars per second that these devices cost even if nothing holds them."""
    each = {device.name: device for device in devices}.values()
    return prices.usd_per_s([(device, 1.0) for device in each], "released_usd_per_hour")


def learning(calls: Sequence[Invocation], learner: str, since_s: float) -> tuple[float, float]:
    """Seconds since a time in which the learner learned, and in which it alone worked at that."""
    spans = [(max(call.start_s, since_s), call.end_s, call.function == learner and call.work in _LEARNS)
             for call in calls]  # fmt: skip
    everything = length(union((start_s, end_s) for start_s, end_s, _ in spans))
    others = length(union((start_s, end_s) for start_s, end_s, learns in spans if not learns))
    return length(union((start_s, end_s) for start_s, end_s, learns in spans if learns)), everything - others


@dataclass(frozen=True, slots=True)
class RankChoice:
    """A number of ranks for the steps to come."""

    ranks: int
    reason: str
    figures: Mapping[str, float]
    """What it follows from: by number of ranks the expected seconds and US dollars of a step."""


def choose_ranks(measured: StepMeasured, usd_per_s: Mapping[int, float], contract: Contract) -> RankChoice:
    """The number of ranks that suits the contract of a step best, of those in `usd_per_s`, which are the numbers whose
    devices are there and the present one, with the US dollars per second that the release of so many would save. Of
    equal ones the present one, then the smallest."""
    expected = {ranks: measured.step_with(ranks, usd_per_s) for ranks in usd_per_s}
    order = sorted(usd_per_s, key=lambda ranks: (ranks != measured.ranks, ranks))
    chosen = min(order, key=lambda ranks: _rank(expected, ranks, contract))
    (before_s, before_usd), (step_s, cost_usd) = expected[measured.ranks], expected[chosen]
    reason = f"{contract}: {step_s:.3g} s and {cost_usd:.3g} USD a step with {chosen} ranks" + (
        f", against {before_s:.3g} s and {before_usd:.3g} USD with {measured.ranks}" if chosen != measured.ranks else ""
    )
    figures = {f"step_s/{ranks}": expected[ranks][0] for ranks in sorted(expected)} | {
        f"step_usd/{ranks}": expected[ranks][1] for ranks in sorted(expected)
    }
    return RankChoice(chosen, reason, figures)


def _rank(expected: Mapping[int, tuple[float, float]], ranks: int, contract: Contract) -> tuple[float, ...]:
    """Smaller is better. What breaks a limit comes after what keeps it, and then the nearest to the limit."""
    step_s, cost_usd = expected[ranks]
    if isinstance(contract, CheapestUnderDeadline):
        late_s = max(step_s - contract.deadline_s, 0.0)
        return late_s, cost_usd, step_s
    if isinstance(contract, FastestUnderBudget):
        over_usd = max(cost_usd - contract.budget_usd, 0.0)
        return over_usd, step_s, cost_usd
    least_s, least_usd = (min(each[part] for each in expected.values()) for part in (0, 1))
    relative_s, relative_usd = step_s / (least_s or 1.0), cost_usd / (least_usd or 1.0)
    return (contract.time_weight * relative_s + (1 - contract.time_weight) * relative_usd,)
