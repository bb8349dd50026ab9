"""The deadline margin: a step is planned to end early enough that deadlines are kept as often as was asked. Pure.

Two figures are learned from the errors of the run's own forecasts. The confidence to ask of a forecast, so that "ends
by then, with probability p" comes true with frequency p (`Coverage`). And the share of their given time that steps
took: a deadline is divided by an upper bound of that share (`StepMargin.reserve`).
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
"""Confidence of an event that is as likely as not."""

FIRST_SCATTER, FIRST_STEPS = 0.08, 2
"""Prior scatter of the share of its time that a step takes, and the number of steps as which the prior counts."""

PRIOR_STEPS = 4.0
"""Prior: as if this many steps with right forecasts had been seen before the first step."""

STEPS_SEEN = 64
"""The quality of forecasts is judged by this many of the last steps."""

MOST_CERTAIN, LEAST_CERTAIN = 0.999, 0.001
"""Bounds of the confidence that is asked of a forecast. A forecast that is wrong by far gives the outcome a probability
that rounds to 0 (in a first step, when nothing is known about its prompts). After some such steps a confidence of 0
would be asked for, which no length has, and whose logarithm is not finite."""


@dataclass(frozen=True, slots=True)
class StepMargin:
    """How cautiously a step is planned, so that its deadline is kept with the given probability."""

    confidence: float
    """That probability."""
    level: float
    """Confidence to ask of forecasts so that the deadline is kept."""
    even: float
    """Confidence to ask of forecasts so that they come true as often as not."""
    reserve: float
    """The time of a step is divided by this before it is planned; at least 1."""
    later: float
    """The end of generation by the completion model, at the required confidence, divided by the end of the plan; at
    least 1."""
    revisits: bool
    """Whether most prompts of the step were seen before."""

    def at(self, caution: float) -> tuple[float, float]:
        """Confidence to ask of forecasts, and reserve of time. `caution` 1: as the deadline asks; 0: as likely as not,
        and no reserve. Between them the confidence is linear in `caution`, and the reserve a power."""
        return self.even + caution * (self.level - self.even), self.reserve**caution

    def sooner(self, contract: Contract, reserve: float) -> Contract:
        """The contract for the planner: the deadline is earlier by the reserve, and by the error of plans."""
        if not isinstance(contract, CheapestUnderDeadline):
            return contract
        return CheapestUnderDeadline(contract.deadline_s / reserve / self.later)


@dataclass(frozen=True, slots=True)
class StepAim:
    """The goals of a step after planning."""

    margin: StepMargin
    began_s: float = 0.0
    limit_s: float = math.inf
    """Time at which its generation should have ended."""
    foreseen_s: float = math.inf
    """The predicted end of generation, if that is later than `limit_s`."""
    after_s: float = 0.0
    """Predicted seconds of the step after generation."""
    time_usd_per_s: float = 0.0
    """The value of a second of the step; if it is infinite, nothing may delay its end."""
    longest: tuple[Floats, Floats] | None = None
    """The result of `completion.longest_response` when the step began; None if lengths are known."""


class DeadlineMargin:
    """The errors of a run's own forecasts."""

    def __init__(self, confidence: float) -> None:
        """`confidence`: the probability with which deadlines are to be kept."""
        self._asked = confidence
        self._coverage = Coverage()
        self._used = {seen: Recent(1.0, FIRST_SCATTER, FIRST_STEPS) for seen in (False, True)}
        """The share of their given (or predicted) time that steps took. Steps with known prompts are kept separately,
        because their forecasts are better."""
        self._later = Recent(1.0)
        self.steps = 0
        """The number of steps whose generation has ended."""

    def of_step(self, steps: int, *, revisits: bool) -> StepMargin:
        """The margin of a step that begins; `revisits`: whether most of its prompts were seen before.

        A deadline may be for several `steps` together, including this one. Long steps among them are balanced by short
        ones, so the scatter of their mean counts, which is smaller by sqrt(steps).
        """
        normal = NormalDist()
        confidence = normal.cdf(normal.inv_cdf(self._asked) / math.sqrt(steps))
        level, even = self._coverage.level(confidence), self._coverage.level(EVEN)
        reserve = max(self._used[revisits].at(confidence), 1.0)
        return StepMargin(confidence, level, even, reserve, max(self._later.value, 1.0), revisits)

    def planned(self, plan_s: float, expected_s: float) -> None:
        """Learns that a plan ends after `plan_s`, and by the completion model after `expected_s`."""
        self._later.add(expected_s / plan_s)

    def learn(self, at_s: float, view: StepView, aim: StepAim) -> None:
        """Generation has ended: learns the share of its time that it took, and the forecast probability of its longest
        response. A response that was cut off at max_tokens could have been longer, so it is not counted."""
        self.steps += 1
        if math.isfinite(aim.limit_s) and self.steps > 1:  # the first step has no history, so it is not counted
            self._used[aim.margin.revisits].add((at_s - aim.began_s) / (aim.foreseen_s - aim.began_s))
            if not self._used[True].count:  # better forecasts scatter no more
                new = self._used[False]
                self._used[True] = Recent(1.0, new.scatter, FIRST_STEPS + new.count)
        if aim.longest is not None and not view.truncated.any():
            self._coverage.add(math.exp(-float(np.interp(view.tokens.max(), *aim.longest))))


class Coverage:
    """Checks whether "ends by then, with probability p" comes true with frequency p; if not, another p is asked for.

    For each step the probability is kept that the forecast gave to the outcome. If forecasts were right, these would be
    spread evenly over 0 to 1; the level to ask for is their p-quantile, with `PRIOR_STEPS` even values among them.
    """

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._table()

    def add(self, probability: float) -> None:
        self._seen = [*self._seen[1 - STEPS_SEEN :], probability]
        self._table()

    def level(self, confidence: float) -> float:
        """The p to ask for, so that the forecast comes true with probability `confidence`."""
        asked = float(np.interp(confidence, self._share, self._below))
        return min(max(asked, LEAST_CERTAIN), MOST_CERTAIN)

    def _table(self) -> None:
        """How often outcomes with a forecast probability up to `below` have come true."""
        count = len(self._seen)
        self._below = np.concatenate([[0.0], np.sort(self._seen), [1.0]])
        seen = np.concatenate([[0], np.arange(1, count + 1), [count]])
        self._share = (PRIOR_STEPS * self._below + seen) / (PRIOR_STEPS + count)
