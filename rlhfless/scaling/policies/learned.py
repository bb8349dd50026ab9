"""What a run has learned about its own time: starts, what follows generation, engines' pace, and its forecasts. Pure.

Everything begins with what the fleet says of itself, and forgets what is long past.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import NormalDist, median

import numpy as np

from rlhfless.scaling.policies.crew import Layout, awake
from rlhfless.scaling.policies.forecasters import Floats
from rlhfless.scaling.policy import Action, Ints, Release, Room, Start, StepView

OBSERVATIONS = 8
"""So many are remembered: enough for a median that shrugs off a few, few enough to follow a drift."""

TO_DEVIATION = 1.4826
"""A normal distribution's standard deviation by the median distance from its median."""

KEPT = 0.7
"""Weight of what came before in an engine's pace, at each new measurement."""

PRIOR_STEPS = 4.0
"""So many steps of a forecast that is right are taken to have been seen before the first one."""

STEPS_SEEN = 64
"""The last so many steps say how good forecasts are."""


MOST_CERTAIN, LEAST_CERTAIN = 0.999, 0.001
"""No forecast is asked for more, or for less. One that is wrong by far gives what happened a probability that is 0 as a
number (a first step's, of prompts that nothing is known of); after some of those, 0 would be asked for, which no length
has, and whose logarithm is not finite."""


class Recent:
    """The median of the last observations, and how far they scatter around it. One that stands out, such as a first
    step with its cold starts, moves neither much."""

    def __init__(self, value: float = 0.0, scatter: float = 0.0, weight: int = 0) -> None:
        """`value` and `scatter` are what they are before anything was seen; later this scatter counts as that of so
        many observations."""
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

    def at(self, confidence: float) -> float:
        """What it stays below with this probability: Student's t, for the scatter is known from few (the first two
        terms of Cornish and Fisher's series for its quantile)."""
        normal = NormalDist().inv_cdf(confidence)
        freedom = max(len(self._seen) + self._weight - 1, 1)
        return self.value + normal * (1 + (normal**2 + 1) / (4 * freedom)) * self.scatter


class Starts:
    """How long replicas take to come up, by kind of room and tier; what the room says until it was seen."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, str | None], Recent] = {}
        self._asked: dict[int, tuple[float, str | None]] = {}

    def see(self, at_s: float, view: StepView, actions: Sequence[Action]) -> None:
        """What a policy has just decided: starts and wakes are timed from when they take effect."""
        tiers: dict[int, str | None] = {}
        for action in actions:
            if isinstance(action, Release):
                tiers[action.place] = action.tier
                self._asked.pop(action.place, None)
            elif isinstance(action, Start):
                tier = tiers.get(action.place, view.places[action.place].tier)
                self._asked[action.place] = max(action.at_s or at_s, at_s), tier

    def up(self, place: int, room: Room, at_s: float, load_s: float) -> None:
        """It serves, having loaded its weights in `load_s`."""
        if place in self._asked:
            since_s, tier = self._asked.pop(place)
            seen = self._seen.setdefault((str(room.function), room.kind, tier), Recent())
            seen.add(max(at_s - since_s - load_s, 0.0))

    def forget(self, place: int) -> None:
        """It was called off, or lost."""
        self._asked.pop(place, None)

    def left_s(self, place: int, room: Room, at_s: float) -> float:
        """How long one that starts is still waited for."""
        since_s, tier = self._asked.get(place, (at_s, None))
        return max(since_s + self.wait_s(room, tier) - at_s, 0.0)

    def wait_s(self, room: Room, tier: str | None) -> float:
        """From a tier (None: from nothing) until it is up, without the load of weights."""
        seen = self._seen.get((str(room.function), room.kind, tier))
        if seen is not None:
            return seen.value
        return room.start_s if tier is None else room.wake_s[tier]


class Meter:
    """What the run has spent, by the rooms' prices: for contracts with a budget."""

    def __init__(self, *, wanted: bool) -> None:
        self.usd = 0.0
        self.others_usd = Recent()
        """Of a step, without generation."""
        self._wanted = wanted
        self._at_s: float | None = None
        self._rates = (0.0, 0.0)
        self._others_usd = 0.0

    def begin(self) -> None:
        """Another step begins."""
        if self._others_usd > 0:
            self.others_usd.add(self._others_usd)
        self._others_usd = 0.0

    def see(self, at_s: float, view: StepView, layout: Layout) -> None:
        """At every event."""
        if not self._wanted:
            return
        passed_s = 0.0 if self._at_s is None else max(at_s - self._at_s, 0.0)
        self.usd += passed_s * sum(self._rates)
        self._others_usd += passed_s * self._rates[1]
        self._at_s = at_s
        self._rates = (
            sum(_usd_per_s(view, layout, place) for place in layout.generation),
            sum(_usd_per_s(view, layout, place) for place in layout.others),
        )


def _usd_per_s(view: StepView, layout: Layout, place: int) -> float:
    """Of one replica now. One that sleeps at the price of its devices pays while nobody else is awake there."""
    room, there = layout.rooms[place], view.places[place]
    if there.tier is None:
        return room.usd_per_s if awake(there) else 0.0
    asleep = room.resident_usd_per_s[there.tier]
    taken = asleep >= room.usd_per_s and any(awake(view.places[other]) for other in layout.neighbours[place])
    return 0.0 if taken else asleep


class Coverage:
    """Whether "ends before, with probability p" came true as often as p; if not, another p is asked of the forecast.

    Of each step the forecast's own probability of what then happened is kept. Were forecasts right, these would be
    spread evenly over 0 to 1; the level to ask for is their p-quantile, with `PRIOR_STEPS` even ones among them.
    """

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._table()

    def add(self, probability: float) -> None:
        self._seen = [*self._seen[1 - STEPS_SEEN :], probability]
        self._table()

    def level(self, confidence: float) -> float:
        """The p to ask for, so that what it names comes true with this probability."""
        asked = float(np.interp(confidence, self._share, self._below))
        return min(max(asked, LEAST_CERTAIN), MOST_CERTAIN)

    def _table(self) -> None:
        """How often what was said to have a probability up to `below` came true."""
        count = len(self._seen)
        self._below = np.concatenate([[0.0], np.sort(self._seen), [1.0]])
        seen = np.concatenate([[0], np.arange(1, count + 1), [count]])
        self._share = (PRIOR_STEPS * self._below + seen) / (PRIOR_STEPS + count)


class Pace:
    """How much slower than its model each engine decodes: 1 as long as it was not measured."""

    def __init__(self, places: int) -> None:
        self.factor: Floats = np.ones(places)
        self._at_s = -math.inf
        self._tokens: Ints = np.empty(0, np.int64)
        self._home: Ints = np.empty(0, np.int64)
        self._iteration_s: Floats = np.zeros(places)

    def begin(self) -> None:
        """Another step: nothing was seen of it yet."""
        self._at_s = -math.inf

    def look(self, at_s: float, view: StepView, samples: Ints, iteration_s: Floats) -> None:
        """At the unfinished `samples`; `iteration_s` [places] is what an iteration should take now, not positive where
        nothing can be said. Samples that were at the same place at the last look tell its pace."""
        passed_s, places, home = at_s - self._at_s, self.factor.size, view.home[samples]
        if 0 < passed_s < math.inf:
            before = self._tokens[samples]
            same = (home >= 0) & (home == self._home[samples]) & (before > 0)
            drawn = np.bincount(home[same], (view.tokens[samples] - before)[same], minlength=places)
            count = np.bincount(home[same], minlength=places)
            expected_s = (self._iteration_s + iteration_s) / 2
            told = (drawn >= LEAST_TOKENS * count) & (count > 0) & (self._iteration_s > 0) & (iteration_s > 0)
            measured = passed_s * count[told] / drawn[told] / expected_s[told]
            self.factor[told] *= (measured / self.factor[told]) ** (1 - KEPT)
        self._at_s, self._tokens, self._home = at_s, view.tokens.copy(), view.home.copy()

    def go_on(self, iteration_s: Floats) -> None:
        """What an iteration should take [places] from this look on, after all that it led to."""
        self._iteration_s = iteration_s


LEAST_TOKENS = 32
"""Fewer tokens between two looks say little: beats and iterations do not begin together."""
