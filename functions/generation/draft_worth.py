"""Whether drafts save time, learned from the passes of an engine: tried, measured, and left where they lose.

A pass over drafts takes longer than one without, and yields more tokens. Which wins depends on how many responses run
side by side, so each doubling of that number is learned by itself: drafts may pay in the tail of a step, and not in its
bulk. Both ways are measured in turn at first; then the one with fewer seconds per token at the median is taken, and the
other one tried again after more and more passes. Pure: times are passed in.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

MEASURED = 15
"""Passes of each way that are remembered. The median of so many does not follow single disturbances."""

FEWEST = 6
"""Passes of each way before one is chosen."""

FIRST_RETRY, LAST_RETRY = 64, 1024
"""Passes until the other way is tried again: twice as many each time, so that a loss of a fifth costs .3 % of the time
at first, and nothing later."""

GAIN = 0.98
"""Drafts must take less than this share of the time without: they cost memory and power, too."""


@dataclass(slots=True)
class _Width:
    """The passes of about so many responses."""

    s_per_token: dict[bool, deque[float]] = field(
        default_factory=lambda: {way: deque(maxlen=MEASURED) for way in (False, True)}
    )
    """By whether drafts were verified."""
    retry: int = FIRST_RETRY
    passes: int = 0
    """Since the other way was tried."""
    chosen: bool = True

    def next(self) -> bool:
        fewest = min(self.s_per_token, key=lambda way: (len(self.s_per_token[way]), not way))
        if len(self.s_per_token[fewest]) < FEWEST:
            return fewest
        without, with_drafts = (statistics.median(self.s_per_token[way]) for way in (False, True))
        before, self.chosen = self.chosen, with_drafts < GAIN * without
        if before != self.chosen:
            self.retry, self.passes = FIRST_RETRY, 0
        self.passes += 1
        if self.passes > self.retry:
            self.retry, self.passes = min(2 * self.retry, LAST_RETRY), 0
            return not self.chosen
        return self.chosen


class DraftWorth:
    """One engine's experience."""

    def __init__(self) -> None:
        self._widths: dict[int, _Width] = {}

    def next(self, responses: int) -> bool:
        """Whether to draft for the next pass over so many responses."""
        return self._of(responses).next()

    def saw(self, responses: int, tokens: int, seconds: float, *, drafted: bool) -> None:
        """The outcome of a pass over these responses alone: no prompt was computed in it."""
        self._of(responses).s_per_token[drafted].append(seconds / tokens)

    def _of(self, responses: int) -> _Width:
        return self._widths.setdefault(responses.bit_length(), _Width())
