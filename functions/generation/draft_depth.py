"""Choose how deep to draft, from measured seconds per token by batch size and depth.

A pass over drafts takes longer than a plain pass and yields more tokens. The cost of a draft depends on the batch
size, so each doubling of it has its own row. A row measures every depth a few times, then uses the depth with the
fewest seconds per token, and re-measures another depth at growing intervals. Pure: times are passed in.
"""

from __future__ import annotations

import statistics
from collections import deque

MEASURED = 24
"""Passes that an entry remembers. Their median duration is robust against single disturbances."""

FEWEST = 6
"""Passes of each depth before the first choice, and of each retry."""

FIRST_RETRY, LAST_RETRY = 64, 1024
"""Passes before another depth is measured again; the interval doubles while the choice stays."""

RESTED = 56
"""Passes that need no observation after a choice not to draft."""

GAIN = 0.98
"""Drafts must take less than this share of the time without them, because they also cost memory and power."""


class DraftDepth:
    """The measurements of one engine."""

    def __init__(self, most: int) -> None:
        """`most`: the deepest drafts, 1 or more."""
        self._most = most
        self._rows: dict[int, _Row] = {}

    def next(self, responses: int) -> tuple[int, int]:
        """Return the depth of the next pass over `responses`, and for how many further passes it holds unobserved."""
        return self._row(responses).next()

    def saw(self, responses: int, seconds: float, depth: int, accepted: int) -> None:
        """Record a pass over these responses, without a prefill, in which `accepted` drafts were accepted."""
        self._row(responses).saw(depth, seconds, 1 + accepted / responses)

    def _row(self, responses: int) -> _Row:
        size = responses.bit_length()
        if size not in self._rows:
            self._rows[size] = _Row(self._most)
        return self._rows[size]


class _Row:
    """Measurements of the depths at one batch size."""

    def __init__(self, most: int) -> None:
        self._passes: list[deque[tuple[float, float]]] = [deque(maxlen=MEASURED) for _ in range(most + 1)]
        """[depths]: (seconds, tokens per response) of the newest passes."""
        self._interval, self._since_retry = FIRST_RETRY, 0
        self._best = self._retried = 0
        self._retry_measures = self._retry_calls = 0
        """Measurements left in the current retry, and passes it may still use."""

    def next(self) -> tuple[int, int]:
        for depth, passes in enumerate(self._passes):
            if len(passes) < FEWEST:
                return depth, 0
        if self._retry_measures and self._retry_calls:
            self._retry_calls -= 1
            return self._retried, 0
        self._choose()
        self._since_retry += 1
        if self._since_retry > self._interval:
            self._interval, self._since_retry = min(2 * self._interval, LAST_RETRY), 0
            self._retry_measures, self._retry_calls = FEWEST, 2 * FEWEST
            self._retried = (self._retried + 1) % len(self._passes)
            if self._retried == self._best:
                self._retried = (self._retried + 1) % len(self._passes)
            return self._retried, 0
        if self._best:
            return self._best, 0
        self._since_retry += RESTED
        return 0, RESTED

    def saw(self, depth: int, seconds: float, tokens: float) -> None:
        self._passes[depth].append((seconds, tokens))
        if depth == self._retried:
            self._retry_measures = max(self._retry_measures - 1, 0)

    def _choose(self) -> None:
        plain_s, *drafting_s = (
            statistics.median(s for s, _ in passes) / statistics.fmean(tokens for _, tokens in passes)
            for passes in self._passes
        )
        fewest_s = min(drafting_s)
        best = 1 + drafting_s.index(fewest_s) if fewest_s < GAIN * plain_s else 0
        if bool(best) != bool(self._best):
            self._interval, self._since_retry = FIRST_RETRY, 0
        self._best = best
