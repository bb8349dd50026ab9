"""How much of a step's time is kept in reserve, so that its deadline is kept as often as was asked for. Pure.

Two things are learned from how the run's own forecasts turned out. Which confidence to ask of a forecast, so that "ends
by then, with probability p" comes true as often as p (`Coverage`). And what share of the time that steps were given
they took: a deadline is divided by what that share stays below (`StepMargin.reserve`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rlhfless.scaling.plan import CheapestUnderDeadline, Contract
from rlhfless.scaling.policies.cost_aware.estimators import Recent
from rlhfless.scaling.policies.cost_aware.forecasters import Floats
from rlhfless.scaling.policy import StepView

EVEN = 0.5
"""Confidence of what is as likely as not."""

FIRST_SCATTER, FIRST_STEPS = 0.08, 2
"""Scatter of the share of its time that a step takes, until steps were seen; and as how many steps that counts."""

PRIOR_STEPS = 4.0
"""So many steps of a forecast that is right are taken to have been seen before the first one."""

STEPS_SEEN = 64
"""The last so many steps say how good forecasts are."""

MOST_CERTAIN, LEAST_CERTAIN = 0.999, 0.001
"""No forecast is asked for more, or for less. A forecast that is wrong by far gives what happened a probability that is
0 as a number (in a first step, when nothing is known of its prompts); after some of those, 0 would be asked for, which
no length has, and whose logarithm is not finite."""


@dataclass(frozen=True, slots=True)
class StepMargin:
    """How cautiously a step is planned, so that its deadline is kept with a probability."""

    confidence: float
    """That probability."""
    level: float
    """Confidence to ask of forecasts for it."""
    even: float
    """Confidence to ask of forecasts for what is to come true as often as not."""
    reserve: float
    """By how many times less time a step is to be given than it has; 1 at least."""
    later: float
    """By how many times later than planned the completion model is confident that generation ends; 1 at least."""
    revisits: bool
    """Whether most prompts of the step were seen before."""

    def at(self, caution: float) -> tuple[float, float]:
        """Confidence to ask of forecasts, and reserve of time. `caution` 1: those of the deadline; 0: as likely as not,
        and no reserve; between them, in a straight line and as a power."""
        return self.even + caution * (self.level - self.even), self.reserve**caution

    def sooner(self, contract: Contract, reserve: float) -> Contract:
        """What to ask of the planner: a deadline earlier by the reserve, and by what plans are too early."""
        if not isinstance(contract, CheapestUnderDeadline):
            return contract
        return CheapestUnderDeadline(contract.deadline_s / reserve / self.later)


@dataclass(frozen=True, slots=True)
class StepAim:
    """What counts in a step whose plan is made."""

    margin: StepMargin
    began_s: float = 0.0
    limit_s: float = math.inf
    """When its generation is to have ended."""
    foreseen_s: float = math.inf
    """When it was foreseen to, if that is later."""
    after_s: float = 0.0
    """What the step takes from then on, as it was foreseen."""
    time_usd_per_s: float = 0.0
    """What a second of it is worth; infinite: nothing may delay its end."""
    longest: tuple[Floats, Floats] | None = None
    """See `completion.longest_response`, as it was when the step began; None if lengths are known."""
    tested: bool = False
    """Whether any step has shown how good forecasts are, or lengths are known."""


class DeadlineMargin:
    """What a run has learned about its own forecasts."""

    def __init__(self, confidence: float) -> None:
        """`confidence`: with which deadlines are to be kept."""
        self._asked = confidence
        self._coverage = Coverage()
        self._used = {seen: Recent(1.0, FIRST_SCATTER, FIRST_STEPS) for seen in (False, True)}
        """What share of the time that steps were given, or seemed to need, they took; of steps with prompts that were
        seen before apart from the others, because their forecasts are better."""
        self._later = Recent(1.0)
        self.steps = 0
        """So many have ended their generation."""

    def of_step(self, steps: int, *, revisits: bool) -> StepMargin:
        """The margin of a step that begins; `revisits`: with prompts most of which were seen before.

        A deadline may be one for so many `steps` together, this one included. What some of them take longer others make
        up for, so the scatter of their mean counts, which is smaller by sqrt(steps).
        """
        normal = NormalDist()
        confidence = normal.cdf(normal.inv_cdf(self._asked) / math.sqrt(steps))
        level, even = self._coverage.level(confidence), self._coverage.level(EVEN)
        reserve = max(self._used[revisits].at(confidence), 1.0)
        return StepMargin(confidence, level, even, reserve, max(self._later.value, 1.0), revisits)

    def planned(self, plan_s: float, expected_s: float) -> None:
        """A plan ends after `plan_s`, and by the completion model after `expected_s`."""
        self._later.add(expected_s / plan_s)

    def learn(self, at_s: float, view: StepView, aim: StepAim) -> None:
        """Generation has ended: how much of its time it took, and whether its longest response was as likely as
        forecast. A response that was cut off at max_tokens could not have been any longer, and says nothing."""
        self.steps += 1
        if math.isfinite(aim.limit_s) and self.steps > 1:  # the first step knows nothing, and is no measure
            self._used[aim.margin.revisits].add((at_s - aim.began_s) / (aim.foreseen_s - aim.began_s))
            if not self._used[True].count:  # what is forecast better scatters no more
                new = self._used[False]
                self._used[True] = Recent(1.0, new.scatter, FIRST_STEPS + new.count)
        if aim.longest is not None and not view.truncated.any():
            self._coverage.add(math.exp(-float(np.interp(view.tokens.max(), *aim.longest))))


class Coverage:
    """Whether "ends by then, with probability p" came true as often as p; if not, another p is asked of the forecast.

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
