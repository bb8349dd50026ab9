"""The size of the learner: how many ranks on devices of which kind; which devices fewer of them take, and which size a
step should have. Pure.

A size is chosen between two steps, from the times of the last one. With n ranks in the place of m, learning takes m / n
of its time, and on another kind of device as much less as that is faster; what other functions work on meanwhile hides
as much of it as before. A change costs the seconds of moving the state, spread over the steps that are left. After a
fault nothing is weighed: the group goes on with the most ranks whose devices are there, of its own kind
if there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rlhfless.records import Invocation, Work
from rlhfless.scaling.intervals import length, union
from rlhfless.scaling.latency.devices import DeviceSheet, device_of
from rlhfless.scaling.placement import Allocation, Device, Placement, rank_devices
from rlhfless.scaling.plan.contract import CheapestUnderDeadline, Contract, FastestUnderBudget
from rlhfless.scaling.prices import PriceBook

LEARNER_RANKS = "learner_ranks"
"""Kind of the decisions about the learner's size."""

CHANGED_IN_S = "changed_in_s"
"""Input of such a decision: seconds of the change. A decision after a fault has none."""

_LEARNS = (Work.EVALUATE, Work.LEARN)


class GroupSize(NamedTuple):
    """A size of the learner."""

    ranks: int
    kind: str
    """Of their devices."""

    def __str__(self) -> str:
        return f"{self.ranks} x {self.kind}"

    @classmethod
    def parse(cls, text: str) -> GroupSize:
        """Inverse of `str`. Raises ValueError."""
        ranks, _, kind = text.partition(" x ")
        return cls(int(ranks), kind)


def rank_rates(kinds: Collection[str], sheet_of: Callable[[str], DeviceSheet] = device_of) -> dict[str, float]:
    """Floating point operations a second of a rank on each kind, by data sheets; of a single kind, which may have none,
    1. `sheet_of` finds the sheets. Raises what that raises, such as UnknownDevice."""
    if len(kinds) == 1:
        return dict.fromkeys(kinds, 1.0)
    sheets = {kind: sheet_of(kind) for kind in kinds}
    return {kind: sheet.flops_per_s.value * sheet.matmul_efficiency.value for kind, sheet in sheets.items()}


class RankSpeeds:
    """How fast a rank learns on each kind of device: as measured between kinds on which it has learned, and else by
    data sheets."""

    def __init__(self, rates: Mapping[str, float]) -> None:
        """`rates`: of each kind, by data sheets (`rank_rates`)."""
        self._rates = rates
        self._token_s: dict[str, float] = {}
        """By kind: seconds of a rank per token, in the last whole step there."""

    def observe(self, size: GroupSize, learn_s: float, tokens: int) -> None:
        """A learner of this size has learned from `tokens` tokens in `learn_s`. Without either nothing is known."""
        if learn_s and tokens:
            self._token_s[size.kind] = learn_s * size.ranks / tokens

    def relative_to(self, now: str) -> dict[str, float]:
        """By kind, relative to kind `now`."""
        token_s = self._token_s
        return {
            kind: token_s[now] / token_s[kind] if now in token_s and kind in token_s else rate / self._rates[now]
            for kind, rate in self._rates.items()
        }


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
    candidates: Mapping[GroupSize, Sequence[Allocation]],
    at_hand: Callable[[Allocation], bool],
    own: str,
    below: GroupSize | None = None,
) -> tuple[Allocation, str]:
    """The devices that a lost group goes on with, and why: of its `own` kind if there are any. `candidates`: the
    allocations by size. `below`: a group of this size was lost again in the same step, so it should be smaller or on
    another kind, if it may be."""
    order = sorted(candidates, key=lambda size: (size.kind != own, -size.ranks))
    if below is not None:
        others = [size for size in order if size.kind != below.kind or size.ranks < below.ranks]
        order = others or order[-1:]
    again = "" if below is None else f", other than {below}, which was lost twice in one step"
    for size in order:
        for allocation in candidates[size]:
            if at_hand(allocation):
                instead = "" if size.kind == own else f", as no devices of kind {own} are"
                return allocation, f"the most ranks whose devices are there{instead}{again}"
    return candidates[order[0]][0], "no devices are there, and the group waits for those of all its ranks"


@dataclass(frozen=True, slots=True)
class StepMeasured:
    """The last step, in seconds and US dollars per second."""

    size: GroupSize
    """Of the learner in it."""
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
    speeds: Mapping[str, float]
    """Of a rank by kind of device, relative to any of them."""

    def step_with(self, size: GroupSize, usd_per_s: Mapping[GroupSize, float]) -> tuple[float, float]:
        """Expected time and cost of each of the steps that are left, with a learner of this size; `usd_per_s`: what
        each size costs."""
        hidden_s = self.learn_s - self.alone_s
        learn_s = self.learn_s * self._speed(self.size) / self._speed(size)
        step_s = self.step_s - self.alone_s + max(learn_s - hidden_s, 0.0)
        cost_usd = step_s * (self.others_usd_per_s + usd_per_s[size])
        if size != self.size:
            change_s = self.change_s / max(self.steps_left, 1)
            most_usd_per_s = max(usd_per_s[size], usd_per_s[self.size])
            step_s, cost_usd = step_s + change_s, cost_usd + change_s * (self.others_usd_per_s + most_usd_per_s)
        return step_s, cost_usd

    def _speed(self, size: GroupSize) -> float:
        return size.ranks * self.speeds[size.kind]


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


def learned_tokens(calls: Sequence[Invocation], learner: str) -> int:
    """Tokens that the learner has learned from in these calls."""
    return sum(call.input_tokens for call in calls if call.function == learner and call.work is Work.LEARN)


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """A size for the steps to come."""

    size: GroupSize
    reason: str
    figures: Mapping[str, float]
    """What it follows from: by size the expected seconds and US dollars of a step."""


def choose_size(measured: StepMeasured, usd_per_s: Mapping[GroupSize, float], contract: Contract) -> SizeChoice:
    """The size that suits the contract of a step best, of those in `usd_per_s`, which are the ones whose devices are
    there and the present one, with the US dollars per second that the release of each would save. Of equal ones the
    present one, then the one with the fewest ranks."""
    expected = {size: measured.step_with(size, usd_per_s) for size in usd_per_s}
    order = sorted(usd_per_s, key=lambda size: (size != measured.size, size))
    chosen = min(order, key=lambda size: _rank(expected, size, contract))
    (before_s, before_usd), (step_s, cost_usd) = expected[measured.size], expected[chosen]
    reason = f"{contract}: {step_s:.3g} s and {cost_usd:.3g} USD a step with {chosen}" + (
        f", against {before_s:.3g} s and {before_usd:.3g} USD with {measured.size}" if chosen != measured.size else ""
    )
    figures = {f"step_s/{size}": expected[size][0] for size in sorted(expected)} | {
        f"step_usd/{size}": expected[size][1] for size in sorted(expected)
    }
    return SizeChoice(chosen, reason, figures)


def _rank(expected: Mapping[GroupSize, tuple[float, float]], size: GroupSize, contract: Contract) -> tuple[float, ...]:
    """Smaller is better. What breaks a limit comes after what keeps it, and then the nearest to the limit."""
    step_s, cost_usd = expected[size]
    if isinstance(contract, CheapestUnderDeadline):
        late_s = max(step_s - contract.deadline_s, 0.0)
        return late_s, cost_usd, step_s
    if isinstance(contract, FastestUnderBudget):
        over_usd = max(cost_usd - contract.budget_usd, 0.0)
        return over_usd, step_s, cost_usd
    least_s, least_usd = (min(each[part] for each in expected.values()) for part in (0, 1))
    relative_s, relative_usd = step_s / (least_s or 1.0), cost_usd / (least_usd or 1.0)
    return (contract.time_weight * relative_s + (1 - contract.time_weight) * relative_usd,)
