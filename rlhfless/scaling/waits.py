"""How long parked samples still wait for their environment. Pure.

A sample that has waited for w seconds is expected to wait as long as the longer ones of the recent waits did (the mean
residual life). The environment's own times need no model: fast and slow tools, a full pool and a dead one show in it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

from rlhfless.scaling.policy import Ints, StepView

OBSERVATIONS = 256
"""Number of kept waits: of several tools and turns, few enough to follow a drift."""

LATE_SHARE = 0.25
"""A sample that waits for longer than all waits seen is expected to wait for this share of its wait again."""


class Waits:
    """The waits of parked samples, over the steps of a run."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=OBSERVATIONS)
        self._sums: tuple[list[float], list[float]] | None = None
        """The seen waits in ascending order, and the sums of the longest 0, 1, 2, ...; None if they have changed."""
        self._since_s: dict[tuple[int, int], float] = {}
        """By step and sample: when a parked sample was first seen."""

    def note(self, at_s: float, view: StepView) -> None:
        """Record the parked samples of a step."""
        parked = set() if view.parked is None else {(view.step, sample) for sample in view.parked.nonzero()[0].tolist()}
        others = {key: since_s for key, since_s in self._since_s.items() if key[0] != view.step}
        self._since_s = others | {key: self._since_s.get(key, at_s) for key in parked}

    def answered(self, at_s: float, step: int, samples: Ints) -> None:
        """Record the ends of waits."""
        for sample in samples.tolist():
            since_s = self._since_s.pop((step, sample), None)
            if since_s is not None:
                self._seen.append(at_s - since_s)
                self._sums = None

    def soonest_s(self, at_s: float) -> float:
        """Return the seconds until the first parked sample is expected back; infinite if none is parked."""
        return min(self._each_s(at_s), default=math.inf)

    def last_s(self, at_s: float) -> float:
        """Return the seconds until the last parked sample is expected back; 0 if none is parked."""
        return max(self._each_s(at_s), default=0.0)

    def _each_s(self, at_s: float) -> Iterable[float]:
        return map(self.remaining_s, {at_s - since_s for since_s in self._since_s.values()})

    def remaining_s(self, waited_s: float) -> float:
        """Return the expected seconds until the answer to a sample that has waited for `waited_s`.

        Before the first answer, a wait is as long again as it has been.
        """
        if self._sums is None:
            ascending = sorted(self._seen)
            self._sums = ascending, [0.0, *accumulate(reversed(ascending))]
        ascending, sums_s = self._sums
        if longer := len(ascending) - bisect_right(ascending, waited_s):
            return sums_s[longer] / longer - waited_s
        return waited_s * (LATE_SHARE if self._seen else 1.0)
