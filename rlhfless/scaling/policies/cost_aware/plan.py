"""The number of actors that generate a step, and the samples of each actor. Pure.

    list      the samples from short to long (`Responses.list_order`), and the time of any stretch of it on one actor
              (`GroupTimes`)
    cut       under a time limit, each actor in turn takes as many of the longest remaining samples as it can finish
              in time; the least cost under a limit does not rise with the limit
    frontier  the cuts under limits from that of the fastest plan to that of the cheapest
    choice    the cut that the contract asks for, after a finer search around the best ones

If a(B) is linear, the cut is the cheapest partition under its limit: the time of a group is `at_zero x its longest
length` plus a sum over its samples, which no partition can change. By induction, the k-th group starts no later in the
list than that of any other feasible partition, so each next group has the smallest possible longest length, and the
number of groups is minimal. The same induction shows that the least feasible limit is the least possible step time, for
any a(B). For piecewise linear a(B), tests compare the cost with an exact dynamic programme. See docs/plan.md.

Deterministic: the same responses, options and contract give the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlhfless.records import Decision
from rlhfless.scaling.policies.contract import CheapestUnderDeadline, Contract, FastestUnderBudget
from rlhfless.scaling.policies.cost_aware.group_times import ActorType, Floats, GroupTimes, Responses
from rlhfless.scaling.policy import Ints

RESOLUTION = 1.004  # Two limits this close (0.4 percent) count as equal: a plan may miss the optimum by one percent

ROUNDING = 1e-9  # Share of a limit by which an end computed as a sum of parts may exceed it

LIMITS = 32  # Limits of the frontier: for a cluster of 64 devices they are 14 percent apart

REFINED = 3
"""Number of the frontier's best plans that are refined down to the least limit at which their actors suffice, where
each number of actors performs best."""


@dataclass(frozen=True, slots=True)
class Standby:
    """Actors that can work after the same wait."""

    tier: str  # `warm`, `starting` or `cold`
    actors: int
    wait_s: float
    """From the start of the step until an actor is ready: 0 if warm, else the rest of its start. This time is paid for.
    """


@dataclass(frozen=True)
class FleetOptions:
    """All actors that a plan may use."""

    actor: ActorType
    standby: tuple[Standby, ...]
    max_actors: int
    weight_sync_s: float = 0.0
    """Time for one actor to load the new weights, after its wait and before its work; paid for."""
    wait_token_s: float = 0.0
    """Time for which a sample waits for its environment, per token of its response (`group_times.NetworkTimes`)."""
    between_usd: float = 0.0
    """Cost of one actor from the end of the step until it works in the next one: of staying, or of being released and
    restarted."""

    @property
    def soonest(self) -> list[Standby]:
        """Return the tier of each actor `[actors]`, soonest first, at most `max_actors`."""
        tiers = sorted(self.standby, key=lambda standby: (standby.wait_s, standby.tier))
        return [standby for standby in tiers for _ in range(standby.actors)][: self.max_actors]


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """The work of one actor."""

    tier: str
    samples: Ints
    """Indices into the responses, longest first: the order in which they are sent to the engine."""
    ready_s: float  # From the start of the step until it can work: its wait, and the load of the new weights
    finish_s: float
    """From the start of the step until its last sample ends. It is paid for until then, and can be released afterwards.
    """
    usd: float  # Until then, plus the cost between this step and the next


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The actors of a step and their work, with predicted time and cost, and the reason for the choice."""

    contract: Contract
    feasible: bool
    """Whether the contract can be kept; if not, the plan is the fastest, or the one with the least total cost."""
    actors: tuple[ActorPlan, ...]  # The actors with the longest samples come first
    step_s: float  # Time at which the last actor ends
    usd: float  # Cost of all actors, each until its own end, plus their cost between this step and the next
    waiting_usd: float  # Cost of everything that waits until the last actor ends
    reason: str
    time_usd_per_s: float
    """Value of a second of the step: 0 under a deadline; given by the weights; under a budget, the saving of a slower
    plan, and infinite if the budget is not fully spent."""

    @property
    def nearest(self) -> Contract:
        """Return the nearest contract that can be kept: `contract` itself if feasible."""
        if self.feasible:
            return self.contract
        is_deadline = isinstance(self.contract, CheapestUnderDeadline)
        return CheapestUnderDeadline(self.step_s) if is_deadline else FastestUnderBudget(self.usd + self.waiting_usd)

    def record(self, step: int, at_s: float) -> Decision:
        """Return the decision as a ledger row."""
        inputs: dict[str, float | int | str | bool] = {
            "contract": str(self.contract),
            "feasible": self.feasible,
            "nearest": str(self.nearest),
            "samples": sum(actor.samples.size for actor in self.actors),
            "step_s": self.step_s,
            "usd": self.usd,
            "waiting_usd": self.waiting_usd,
            "reason": self.reason,
        }
        return Decision(step, at_s, "plan", f"{len(self.actors)} actors", inputs)


def plan(
    step: Responses, options: FleetOptions, contract: Contract, *, waiting_usd_per_s: float = 0.0
) -> GenerationPlan:
    """Plan a step. An infeasible contract gives the nearest plan, and its reason says so.

    `waiting_usd_per_s` is the cost of a second of the step in addition to its actors. Under a deadline the plan may
    therefore end early; under weights it is added to the value of a second; a budget covers it too.

    Raises CapacityError if a single response exceeds the KV cache of an actor.
    """
    search = _Search(step, options)
    fast, cheap = search.fastest, search.cheapest

    def total_usd(cut: _Cut) -> float:
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
            # If holding devices costs nothing extra, a plan can save only time.
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
    actors = search.actors(cut)
    return GenerationPlan(
        contract, chosen is not None, actors, cut.step_s, cut.usd, waiting_usd, reason, time_usd_per_s
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """A partition of the list into one group per actor, longest samples first."""

    begins: Ints  # [actors]: each group ends where the previous one begins; the first ends at the end of the list
    ends_s: Floats  # [actors]
    step_s: float
    usd: float

    @property
    def actors(self) -> int:
        return self.begins.size


class _Search:
    """Search over the cuts of one step on one fleet. Results are cached by limit."""

    def __init__(self, step: Responses, options: FleetOptions) -> None:
        self._options = options
        self._order = step.list_order
        self._times = GroupTimes(options.actor, step, self._order, options.wait_token_s)
        self._standby = options.soonest
        self._ready_s = [standby.wait_s + options.weight_sync_s for standby in self._standby]
        self._tried: dict[float, _Cut | None] = {}  # By limit; None if infeasible
        cheapest = self.within(math.inf)
        assert cheapest is not None  # without a limit a single actor does everything
        self.cheapest = cheapest

    def within(self, limit_s: float) -> _Cut | None:
        """Return the cheapest cut under a limit, or None if infeasible."""
        if limit_s not in self._tried:
            self._tried[limit_s] = self._cut(limit_s)
        return self._tried[limit_s]

    def _cut(self, limit_s: float) -> _Cut | None:
        """Build a cut in one pass from the long end; return None if the actors do not suffice."""
        end, begins, seconds = self._order.size, list[int](), list[float]()
        for ready_s in self._ready_s:
            begin, work_s = self._times.longest_group(end, limit_s - ready_s)
            if begin == end:
                return None
            begins.append(begin)
            seconds.append(work_s)
            end = begin
            if end == 0:
                break
        else:
            return None
        ends_s = np.array(self._ready_s[: len(begins)]) + np.array(seconds)
        options = self._options
        usd = options.actor.usd_per_s * float(ends_s.sum()) + options.between_usd * len(begins)
        return _Cut(np.array(begins), ends_s, float(ends_s.max()), usd)

    @property
    def _cuts(self) -> list[_Cut]:
        return [cut for cut in self._tried.values() if cut is not None]

    @cached_property
    def fastest(self) -> _Cut:
        """Return the cut that ends first."""
        best, count = self.cheapest, self._order.size
        low_s = (self._ready_s[0] + self._times.one_s(count - 1, count)) / RESOLUTION
        low_s = max(low_s, best.step_s / self._options.max_actors / RESOLUTION)
        while low_s * RESOLUTION < best.step_s:
            middle_s = math.sqrt(low_s * best.step_s)
            if (cut := self.within(middle_s)) is None:
                low_s = middle_s
            else:
                best = cut
        return best

    def best(self, value: Callable[[_Cut], float], kept: Callable[[_Cut], bool]) -> _Cut | None:
        """Return the cut with the least value among those that keep a contract, or None if none does."""
        fast, cheap = self.fastest, self.cheapest
        for limit_s in np.geomspace(fast.step_s, max(cheap.step_s, fast.step_s), LIMITS).tolist():
            self.within(limit_s)
        by_count = {cut.actors: cut for cut in self._by_value(value, kept)[::-1]}
        candidates = sorted(by_count.values(), key=value)[:REFINED]
        for cut in [*candidates, *self._with_more(candidates[0] if candidates else cheap)]:
            self._tighten(cut)
        return next(iter(self._by_value(value, kept)), None)

    def _tighten(self, cut: _Cut) -> None:
        """Try limits down to the least at which a cut's actors suffice."""
        low_s, high_s = max((other.step_s for other in self._with_more(cut)), default=0.0), cut.step_s
        low_s = max(low_s, self.fastest.step_s)
        while low_s * RESOLUTION < high_s:
            middle_s = math.sqrt(low_s * high_s)
            tried = self.within(middle_s)
            if tried is None or tried.actors > cut.actors:
                low_s = middle_s
            else:
                high_s = tried.step_s

    def _with_more(self, cut: _Cut) -> list[_Cut]:
        """Return the slowest of the faster cuts with more actors, if any."""
        more = [other for other in self._cuts if other.actors > cut.actors and other.step_s < cut.step_s]
        return sorted(more, key=lambda other: other.step_s)[-1:]

    def _by_value(self, value: Callable[[_Cut], float], kept: Callable[[_Cut], bool]) -> list[_Cut]:
        """Return the cuts so far that keep a contract, least value first, ties by cost, time and actors."""
        return sorted(filter(kept, self._cuts), key=lambda cut: (value(cut), cut.usd, cut.step_s, cut.actors))

    def saving_of_slower(self, chosen: _Cut) -> float:
        """Return the price of a second at a cut that spends its budget: the most that a slower cut saves per second.

        Infinite if the budget would pay for a faster cut than the fastest one.
        """
        if chosen.step_s <= self.fastest.step_s * RESOLUTION:
            return math.inf
        slower = [cut for cut in self._cuts if cut.step_s > chosen.step_s * RESOLUTION]
        savings = [(chosen.usd - cut.usd) / (cut.step_s - chosen.step_s) for cut in slower]
        return max([0.0, *savings])

    def reason(self, chosen: _Cut) -> str:
        """Describe a cut in a line, compared with the next faster one with more actors."""
        usd = f"${chosen.usd:.3g}" if chosen.usd else "no extra cost"
        text = f"{chosen.actors} actors: {chosen.step_s:.3g} s, {usd}"
        faster = [c for c in self._cuts if c.step_s < chosen.step_s / RESOLUTION and c.actors > chosen.actors]
        if not faster:
            return f"{text}; more would save no time"
        other = min(faster, key=lambda cut: (cut.actors, cut.step_s))
        saved_s, more_usd = chosen.step_s - other.step_s, other.usd - chosen.usd
        more = f"for ${more_usd:.2g}" if more_usd else "at no extra cost"
        return f"{text}; {other.actors} would save {saved_s:.2g} s {more}"

    def actors(self, cut: _Cut) -> tuple[ActorPlan, ...]:
        """Return the actors of a cut with their samples."""
        options, ends = self._options, (self._order.size, *cut.begins.tolist())
        return tuple(
            ActorPlan(
                standby.tier,
                self._order[begin:end][::-1].copy(),
                ready_s,
                end_s,
                end_s * options.actor.usd_per_s + options.between_usd,
            )
            for standby, ready_s, begin, end, end_s in zip(
                self._standby, self._ready_s, cut.begins.tolist(), ends, cut.ends_s.tolist(), strict=False
            )
        )
