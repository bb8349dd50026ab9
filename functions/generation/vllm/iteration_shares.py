"""The time of an engine's iterations, split among the runs that share it.

Each iteration's time is split by tokens. A prompt token and a generated one cost different times, so they are weighed:
the weights are those that explain the times of recent iterations best (least squares of t = a p + b d, for p prompt and
d generated tokens). The parts of an iteration add up to its time, whatever the weights are.

vLLM's core calls this in its process (see scheduler.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHARES = "rlhfless_shares"
"""Name of the method that vLLM's core gets."""

FORGETS = 0.995
"""Weight of an iteration relative to the next one in the fit: about 200 iterations count."""

LEAST_RATIO = 0.01
"""Smallest weight of a kind of token, relative to the other: the fit may find that one costs nothing."""


class TokenWeights:
    """The relative times of prompt tokens and generated tokens."""

    def __init__(self) -> None:
        self._pp = self._pd = self._dd = self._pt = self._dt = 0.0

    def add(self, prompt: int, generated: int, seconds: float) -> None:
        """Add an iteration."""
        self._pp = FORGETS * self._pp + prompt * prompt
        self._pd = FORGETS * self._pd + prompt * generated
        self._dd = FORGETS * self._dd + generated * generated
        self._pt = FORGETS * self._pt + prompt * seconds
        self._dt = FORGETS * self._dt + generated * seconds

    def weights(self) -> tuple[float, float]:
        """Return (a, b); equal ones until both kinds of token were seen."""
        scale = self._pp * self._dd
        determinant = scale - self._pd**2
        if not scale or determinant <= 1e-6 * scale:
            return 1.0, 1.0
        a = (self._pt * self._dd - self._dt * self._pd) / determinant
        b = (self._dt * self._pp - self._pt * self._pd) / determinant
        largest = max(a, b)
        return (max(a, LEAST_RATIO * largest), max(b, LEAST_RATIO * largest)) if largest > 0 else (1.0, 1.0)


class IterationShares:
    """Seconds of iterations by run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._weights = TokenWeights()
        self._began_s: dict[int, float] = {}
        self._last_s = 0.0

    def begin(self, iteration: int, now_s: float) -> None:
        """Record the start of an iteration, whatever identifies it."""
        self._began_s[iteration] = now_s

    def end(self, iteration: int, tokens: Mapping[str, tuple[int, int]], now_s: float) -> None:
        """Split the time since the iteration's start, or since the end of the one before if that was later.

        `tokens`: prompt and generated tokens of each run in the iteration.
        """
        lasted_s = now_s - max(self._began_s.pop(iteration, now_s), self._last_s)
        self._last_s = now_s
        if not tokens or lasted_s <= 0:
            return
        prompt, generated = (sum(each[kind] for each in tokens.values()) for kind in (0, 1))
        self._weights.add(prompt, generated, lasted_s)
        a, b = self._weights.weights()
        whole = a * prompt + b * generated
        for run_id, (p, d) in tokens.items():
            self.seconds[run_id] = self.seconds.get(run_id, 0.0) + lasted_s * (a * p + b * d) / whole


def shares_of(core: Any) -> dict[str, float]:
    """Return the seconds by run of vLLM's EngineCore."""
    shares: IterationShares = core.scheduler.shares
    return shares.seconds
