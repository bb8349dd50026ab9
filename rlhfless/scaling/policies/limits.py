"""Until when a step's generation has to have ended, and how sure of that the scaler is. Pure.

Two things are learned from how its own forecasts turned out. Which confidence to ask of a forecast, so that "ends
before, with probability p" comes true as often as p (`Coverage`). And how much of the time that is left to keep in
reserve: of the time that steps were given they took a share, and a deadline is divided by what that share stays below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rlhfless.scaling.policies.forecasters import Floats
from rlhfless.scaling.policies.learned import Coverage, Recent
from rlhfless.scaling.policy import StepView

EVEN = 0.5
"""Confidence of what is as likely as not."""

FIRST_SCATTER, FIRST_STEPS = 0.08, 2
"""Of the time that steps take, as a share of the time they were given, until some were seen; and as how many of them
that counts."""


@dataclass(slots=True)
class StepAim:
    """What counts in a step."""

    began_s: float = 0.0
    limit_s: float = math.inf
    """When its generation is to have ended."""
    foreseen_s: float = math.inf
    """When it was foreseen to, if that is later."""
    after_s: float = 0.0
    """What the step takes from then on, as it was foreseen."""
    time_usd_per_s: float = 0.0
    """What a second of it is worth; infinite: nothing may delay its end."""


class Limits:
    """State of one run."""

    def __init__(self, confidence: float) -> None:
        """`confidence`: with which deadlines are to be kept."""
        self._asked = confidence
        self.confidence = confidence
        """With which this step's is to be."""
        self.aim = StepAim()
        self._coverage = Coverage()
        self._used = {seen: Recent(1.0, FIRST_SCATTER, FIRST_STEPS) for seen in (False, True)}
        """What share of the time that steps were given, or seemed to need, they took; of steps with prompts that were
        seen before apart from the others, because their forecasts are better."""
        self._revisits = False
        """Whether most prompts of the step were seen before."""
        self._longest: tuple[Floats, Floats] | None = None
        """Tokens, and -log of the probability, when the step began, that no response would be longer."""
        self._steps = 0

    def share(self, steps: int, *, revisits: bool) -> None:
        """A step begins; `revisits`: with prompts most of which were seen before. Its deadline is its part of one for
        so many steps together, with itself: 1 if it has its own. What some take longer others make up for, so the
        scatter of their mean counts, that by sqrt(steps)."""
        normal = NormalDist()
        self.confidence = normal.cdf(normal.inv_cdf(self._asked) / math.sqrt(steps))
        self._revisits = revisits

    @property
    def tested(self) -> bool:
        """Whether any step has shown how good forecasts are, or lengths are known."""
        return self._steps > 0 or self._longest is None

    @property
    def level(self) -> float:
        """The confidence to ask of forecasts."""
        return self._coverage.level(self.confidence)

    @property
    def even(self) -> float:
        """The confidence to ask of forecasts for what is to come true as often as not."""
        return self._coverage.level(EVEN)

    @property
    def reserve(self) -> float:
        """By how many times less time a step is to be given than it has; 1 at least."""
        return max(self._used[self._revisits].at(self.confidence), 1.0)

    def caution(self, share: float) -> tuple[float, float]:
        """A confidence to ask of forecasts, and a reserve of time: at 1 what a deadline is kept with, at 0 neither."""
        return self.even + share * (self.level - self.even), self.reserve**share

    def begin(self, aim: StepAim, longest: tuple[Floats, Floats] | None) -> None:
        """A step has been planned. `longest`: see `outlook.longest_response`; None if lengths are known."""
        self.aim, self._longest = aim, longest

    def learn(self, at_s: float, view: StepView) -> None:
        """Generation has ended: how much of its time it took, and whether its longest response was as likely as
        forecast. One that was cut off at max_tokens could not have been any longer, and says nothing."""
        self._steps += 1
        if math.isfinite(self.aim.limit_s) and self._steps > 1:  # the first step knows nothing, and is no measure
            self._used[self._revisits].add((at_s - self.aim.began_s) / (self.aim.foreseen_s - self.aim.began_s))
            if not self._used[True].count:  # what is forecast better scatters no more
                new = self._used[False]
                self._used[True] = Recent(1.0, new.scatter, FIRST_STEPS + new.count)
        if self._longest is not None and not view.truncated.any():
            self._coverage.add(math.exp(-float(np.interp(view.tokens.max(), *self._longest))))
