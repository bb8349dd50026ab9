"""Estimates of a run's own times and costs: medians, start times, spending and the deadline margin. Pure.

Each estimator starts with the fleet's figures and forgets old observations.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

from rlhfless.records import ReplicaState
from rlhfless.scaling.policies.fleet import PolicyContext
from rlhfless.scaling.policy import Action, Release, Start

WARM, STARTING, COLD = "warm", "starting", "cold"
"""Tiers of a slot, by how soon an actor there can work."""

OBSERVATIONS = 8  # Number of kept observations: enough for a median that ignores outliers, few enough to follow a drift

FIRST_SCATTER, FIRST_STEPS = 0.08, 2
"""Prior scatter of step durations relative to their plans, and the number of steps that the prior counts as."""

TO_DEVIATION = 1.4826  # Standard deviation of a normal distribution, divided by the median distance from its median


class Recent:
    """The median and scatter of the last observations, both robust to outliers."""

    def __init__(self, value: float = 0.0, scatter: float = 0.0, weight: int = 0) -> None:
        """Initialise the estimate.

        `value` and `scatter` apply before the first observation; later `scatter` counts as `weight` observations.
        """
        self.value = value
        self.count = 0
        self.scatter = scatter
        self._before = scatter
        self._weight = weight
        self._seen: deque[float] = deque(maxlen=OBSERVATIONS)

    def add(self, value: float) -> None:
        self._seen.append(value)
        self.count += 1
        self.value = median(self._seen)
        scatter = TO_DEVIATION * median(abs(seen - self.value) for seen in self._seen)
        total = self._weight * self._before**2 + len(self._seen) * scatter**2
        self.scatter = math.sqrt(total / (self._weight + len(self._seen)))

    @property
    def least(self) -> float:
        """Return the smallest of the last observations; 0 while there is only one, which may be an outlier."""
        return min(self._seen) if self.count > 1 else 0.0

    def at(self, confidence: float) -> float:
        """Return an upper bound of the next observation with this probability: value + t scatter.

        t is the quantile of Student's distribution, because the scatter is estimated from few observations. With z the
        normal quantile and f degrees of freedom, t = z (1 + (z^2 + 1) / (4 f)), the first two terms of the
        Cornish-Fisher series.
        """
        normal = NormalDist().inv_cdf(confidence)
        freedom = max(len(self._seen) + self._weight - 1, 1)
        return self.value + normal * (1 + (normal**2 + 1) / (4 * freedom)) * self.scatter


class StartTimes:
    """Start times of replicas: the fleet's figures, which follow the run's starts, and the waits for devices.

    A start is not timed until its replica serves: an actor that is up ahead of its step waits for the step's weights,
    and would be started ever earlier.
    """

    def __init__(self, again_s: Callable[[PolicyContext, int], float] = lambda *_: 0.0) -> None:
        """Initialise the estimates.

        `again_s` returns the seconds that a start at a slot waits for devices that the run has released.
        """
        self._again_s = again_s
        self._asked: dict[int, tuple[float, float]] = {}
        """By slot: when its start takes effect, and how long it waits for its devices."""

    def note_actions(self, now: PolicyContext, actions: Sequence[Action]) -> None:
        """Record when starts take effect."""
        for action in actions:
            if isinstance(action, Release):
                self._asked.pop(action.slot, None)
            elif isinstance(action, Start):
                self._asked[action.slot] = max(action.at_s or now.at_s, now.at_s), self._waits_s(now, action.slot)

    def forget(self, slot: int) -> None:
        """Drop the start of a replica that serves or is lost."""
        self._asked.pop(slot, None)

    def paid_s(self, now: PolicyContext, slot: int, passed_s: float) -> float:
        """Return the seconds of the last `passed_s` in which an awake replica held its devices, after waiting for
        them."""
        return min(passed_s, max(now.at_s - sum(self._asked[slot]), 0.0)) if slot in self._asked else passed_s

    def standby(self, now: PolicyContext, slot: int) -> tuple[str, float]:
        """Return the tier of a slot, and the seconds until a replica there is ready, excluding its load of weights."""
        replica_slot = now.layout.replica_slots[slot]
        if now.view.slots[slot].state is ReplicaState.STARTING:
            since_s, waits_s = self._asked.get(slot, (now.at_s, 0.0))
            return STARTING, max(since_s + waits_s + replica_slot.start_s - now.at_s, 0.0)
        return (WARM, 0.0) if now.awake(slot) else (COLD, self.start_s(now, slot))

    def until_serving_s(self, now: PolicyContext, slot: int) -> float:
        """Return the seconds until an actor at a slot can take samples."""
        if now.view.slots[slot].state is ReplicaState.SERVING:
            return 0.0
        return self.standby(now, slot)[1] + now.view.fleet.load_s

    def start_s(self, now: PolicyContext, slot: int) -> float:
        """Return the seconds of a cold start, including the wait for devices, excluding the load of weights."""
        return self._waits_s(now, slot) + now.layout.replica_slots[slot].start_s

    def _waits_s(self, now: PolicyContext, slot: int) -> float:
        return max(now.layout.replica_slots[slot].reacquire_s, self._again_s(now, slot))


class Spending:
    """Cost of the run so far, at the slots' prices, for contracts with a budget."""

    def __init__(self) -> None:
        self.usd = 0.0
        self.after_usd = Recent()  # Cost of a step while nothing is generated
        self.of_plan = Recent(1.0)  # cost of generation relative to its plan: below 1 if actors are released early
        self._at_s = math.inf  # Time at which the cost was last added up
        self._begun = 0
        self._planned_usd = self._generation_usd = self._after_usd = 0.0  # Of the step

    def begin_step(self) -> None:
        """Record the cost of the previous step."""
        if self._generation_usd > 0:  # steps may start at once
            if self._begun > 1:  # the first step has cold starts
                self.after_usd.add(self._after_usd)
            if self._planned_usd > 0:
                self.of_plan.add(self._generation_usd / self._planned_usd)
        self._begun += 1
        self._after_usd = self._generation_usd = self._planned_usd = 0.0

    def note_plan(self, usd: float) -> None:
        """Record the planned cost of generation."""
        self._planned_usd = usd

    def add_until(self, now: PolicyContext, starts: StartTimes, *, generating: bool) -> None:
        """Add the cost since the last event, before this event's actions.

        Replicas start and stop at events, so those that are awake now were awake since the last event. They cost
        nothing while they wait for devices. A learner's start is seen only when its work is done.
        """
        passed_s = max(now.at_s - self._at_s, 0.0)
        awake = [slot for slot in (*now.layout.generation, *now.layout.others) if now.awake(slot)]
        prices = now.layout.replica_slots
        usd = sum(prices[slot].usd_per_s * starts.paid_s(now, slot, passed_s) for slot in awake)
        usd += passed_s * now.view.fleet.kept_usd_per_s
        self.usd += usd
        if generating:
            self._generation_usd += usd
        else:
            self._after_usd += usd
        self._at_s = now.at_s


@dataclass(frozen=True, slots=True)
class StepMargin:
    """Safety margin in the plan of a step, chosen so that its deadline is kept with the given probability."""

    confidence: float  # That probability
    reserve: float  # The time of a step is divided by this before it is planned
    revisits: bool  # Whether most prompts of the step were seen before


@dataclass(frozen=True, slots=True)
class StepAim:
    """The goals of a step after planning."""

    margin: StepMargin = StepMargin(0.5, 1.0, False)
    began_s: float = 0.0
    limit_s: float = math.inf  # Time at which its generation should have ended
    planned_s: float = math.inf  # Time at which its generation ends by the plan
    after_s: float = 0.0  # Predicted seconds of the step after generation
    time_usd_per_s: float = 0.0  # Value of a second of the step; if infinite, nothing may delay its end

    def delay_usd(self, late_s: float, waiting_usd_per_s: float) -> float:
        """Return the cost of a delay of such a step: at least that of all that waits, and infinite past its limit."""
        if late_s <= 0:
            return 0.0
        if self.planned_s + late_s > self.limit_s:
            return math.inf
        return max(self.time_usd_per_s, waiting_usd_per_s) * late_s


class DeadlineMargin:
    """The errors of a run's own forecasts."""

    def __init__(self, confidence: float) -> None:
        """Initialise the margin. `confidence` is the probability with which deadlines are to be kept."""
        self._asked = confidence
        # Step durations relative to their plans. Forecasts of known prompts are better, so these steps are kept
        # separately.
        self._used = {seen: Recent(1.0, FIRST_SCATTER, FIRST_STEPS) for seen in (False, True)}
        self.steps = 0  # The number of steps whose generation has ended

    def of_step(self, steps: int, *, revisits: bool) -> StepMargin:
        """Return the margin of a step. `revisits`: whether most of its prompts were seen before.

        A deadline for several `steps` needs a margin for their mean, whose scatter is smaller by sqrt(steps).
        """
        normal = NormalDist()
        confidence = normal.cdf(normal.inv_cdf(self._asked) / math.sqrt(steps))
        return StepMargin(confidence, self._used[revisits].at(confidence), revisits)

    def learn(self, at_s: float, aim: StepAim) -> None:
        """Record how long a step's generation took relative to its plan."""
        self.steps += 1
        if math.isfinite(aim.limit_s) and self.steps > 1:  # the first step has no history, so it is not counted
            self._used[aim.margin.revisits].add((at_s - aim.began_s) / (aim.planned_s - aim.began_s))
            if not self._used[True].count:  # better forecasts scatter no more
                new = self._used[False]
                self._used[True] = Recent(1.0, new.scatter, FIRST_STEPS + new.count)
