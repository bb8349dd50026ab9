"""The deadline margin: a step is planned to end early enough that deadlines are kept as often as was asked. Pure.

How long steps took beside their plans is learned from the run: a deadline is divided by an upper bound of that ratio
(`StepMargin.reserve`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from rlhfless.scaling.policies.cost_aware.estimators import Recent

EVEN = 0.5
"""Confidence of an event that is as likely as not."""

FIRST_SCATTER, FIRST_STEPS = 0.08, 2
"""Prior scatter of how long steps take beside their plans, and the number of steps as which the prior counts."""


@dataclass(frozen=True, slots=True)
class StepMargin:
    """How cautiously a step is planned, so that its deadline is kept with the given probability."""

    confidence: float
    """That probability."""
    reserve: float
    """The time of a step is divided by this before it is planned."""
    revisits: bool
    """Whether most prompts of the step were seen before."""


@dataclass(frozen=True, slots=True)
class StepAim:
    """The goals of a step after planning."""

    margin: StepMargin
    began_s: float = 0.0
    limit_s: float = math.inf
    """Time at which its generation should have ended."""
    planned_s: float = math.inf
    """Time at which its generation ends by the plan."""
    after_s: float = 0.0
    """Predicted seconds of the step after generation."""
    time_usd_per_s: float = 0.0
    """The value of a second of the step; if it is infinite, nothing may delay its end."""


class DeadlineMargin:
    """The errors of a run's own forecasts."""

    def __init__(self, confidence: float) -> None:
        """`confidence`: the probability with which deadlines are to be kept."""
        self._asked = confidence
        self._used = {seen: Recent(1.0, FIRST_SCATTER, FIRST_STEPS) for seen in (False, True)}
        """How long steps took beside their plans. Steps with known prompts are kept separately, because their forecasts
        are better."""
        self.steps = 0
        """The number of steps whose generation has ended."""

    def of_step(self, steps: int, *, revisits: bool) -> StepMargin:
        """The margin of a step that begins; `revisits`: whether most of its prompts were seen before.

        A deadline may be for several `steps` together, including this one. Long steps among them are balanced by short
        ones, so the scatter of their mean counts, which is smaller by sqrt(steps).
        """
        normal = NormalDist()
        confidence = normal.cdf(normal.inv_cdf(self._asked) / math.sqrt(steps))
        return StepMargin(confidence, self._used[revisits].at(confidence), revisits)

    def learn(self, at_s: float, aim: StepAim) -> None:
        """Generation has ended: learns how long it took beside its plan."""
        self.steps += 1
        if math.isfinite(aim.limit_s) and self.steps > 1:  # the first step has no history, so it is not counted
            self._used[aim.margin.revisits].add((at_s - aim.began_s) / (aim.planned_s - aim.began_s))
            if not self._used[True].count:  # better forecasts scatter no more
                new = self._used[False]
                self._used[True] = Recent(1.0, new.scatter, FIRST_STEPS + new.count)
