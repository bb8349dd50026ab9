"""How deep to draft, learned from the passes of an engine: tried, measured, and left where drafts lose.

A pass over drafts takes longer than one without, and yields more tokens. A pass over B responses, each with at most d
drafts, has

    B (1 + sum of accepted_i for i <= d) tokens  in  s(sum of drafted_i for i <= d) seconds

where drafted_i and accepted_i are the drafts of a response and pass at place i, and s is the line through the medians
of measured passes by their drafts for each response. The depth with the fewest seconds per token is taken, 0 unless
the gain is worth it. How much a draft costs depends on B, so each doubling of it is learned by itself: drafts may pay
in the tail of a step, and not in its bulk. How often a draft is right does not, and is learned once. Passes without
drafts and passes of full depth are measured in turn at first, and tried again after more and more passes. Where so few
are right that they would not pay if they cost nothing, no batch size measures what they cost.
Pure: times are passed in.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MEASURED = 15
"""Passes of each kind that are remembered. The median of so many does not follow single disturbances."""

FEWEST = 6
"""Passes without drafts, and of full depth, before a depth is chosen."""

FIRST_RETRY, LAST_RETRY = 64, 1024
"""Passes until another depth is tried again: twice as many each time, so that a loss of a fifth costs .3 % of the time
at first, and nothing later."""

MOST_TRIES = 4
"""Passes that one retry may take: one that is disturbed is not measured."""

RECKONED, RESTED = 8, 56
"""Passes for which a choice stands, and passes after them that are not even looked at, where it is not to draft."""

GAIN = 0.98
"""Drafts must take less than this share of the time without: they cost memory and power, too."""

FADING = 0.98
"""What a pass leaves of the weight of those before: drafts of the last 50 passes count."""


ENOUGH = 40
"""Responses in passes with drafts, after fading, until what they say counts for batches of all sizes: a response alone
comes to 50."""


class _Places:
    """Drafts by their place in a pass, of passes over any number of responses."""

    def __init__(self, most: int) -> None:
        self._counts = np.zeros((3, most))
        """Responses that might have had a draft there, had one, and had it accepted."""

    def saw(self, responses: int, limit: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self._counts[:, :limit] *= FADING
        self._counts[0, :limit] += responses
        for row, counts in enumerate((drafted, accepted), 1):
            self._counts[row, : len(counts)] += counts

    def up_to(self) -> npt.NDArray[np.float64]:
        """[2, depths]: drafts of a response and pass, and accepted ones, up to each place."""
        return np.asarray(np.cumsum(self._counts[1:] / np.maximum(self._counts[0], 1), axis=1))

    @property
    def useless(self) -> bool:
        """Whether drafts that cost nothing would not pay."""
        return bool(self._counts[0, -1] >= ENOUGH and GAIN * (1 + self.up_to()[1, -1]) < 1)


class _Retries:
    """When something else than what seems best is tried again."""

    def __init__(self) -> None:
        self.reset()
        self._tries = 0
        """Passes that are left for it."""

    def reset(self) -> None:
        """What seems best has changed."""
        self._interval, self._passes = FIRST_RETRY, 0

    def goes_on(self) -> bool:
        """Whether the next pass belongs to a retry that is under way."""
        self._tries = max(self._tries - 1, 0)
        return self._tries > 0

    def rest(self, passes: int) -> None:
        """So many passes will not be looked at."""
        self._passes += passes

    def is_due(self) -> bool:
        """Counts the next pass; whether it begins a retry."""
        self._passes += 1
        if self._passes <= self._interval:
            return False
        self._interval, self._passes, self._tries = min(2 * self._interval, LAST_RETRY), 0, MOST_TRIES
        return True

    def done(self) -> None:
        """The retry was measured."""
        self._tries = 0


class _Width:
    """The passes of about so many responses."""

    def __init__(self, most: int, places: _Places) -> None:
        self._most = self._depth = most
        self._plain_s: deque[float] = deque(maxlen=MEASURED)
        self._drafting: defaultdict[int, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=MEASURED))
        """By doublings of drafts: drafts for each response, and seconds."""
        self._measured = 0
        """Passes of full depth, up to FEWEST."""
        self._places = places
        self._retries, self._passes = _Retries(), 0
        self._tried = 0
        """The depth that was tried last."""

    def next(self) -> tuple[int, int]:
        if min(self._measured, len(self._plain_s)) < FEWEST:
            return self._most if self._measured <= len(self._plain_s) else 0, 0
        if self._retries.goes_on():
            return self._tried, 0
        if self._passes % RECKONED == 0:
            before, self._depth = self._depth, self._best()
            if bool(before) != bool(self._depth):
                self._retries.reset()
        self._passes += 1
        if self._retries.is_due():
            others = [depth for depth in (0, self._most) if depth != self._depth]
            self._tried = others[0] if self._tried != others[0] else others[-1]
            return self._tried, 0
        rests = 0 if self._depth or self._passes % RECKONED else RESTED
        self._retries.rest(rests)
        return self._depth, rests

    def saw(self, responses: int, seconds: float, limit: int, drafts: int) -> None:
        if limit == self._tried:
            self._retries.done()
        if not limit:
            self._plain_s.append(seconds)
            return
        self._measured = min(self._measured + (limit == self._most), FEWEST)
        self._drafting[drafts.bit_length()].append((drafts / responses, seconds))

    def _best(self) -> int:
        plain_s = statistics.median(self._plain_s)
        medians = sorted(tuple(map(statistics.median, zip(*passes, strict=True))) for passes in self._drafting.values())
        counts, seconds = zip(*([] if 0 in self._drafting else [(0.0, plain_s)]), *medians, strict=True)
        drafted, accepted = self._places.up_to()
        token_s = np.interp(drafted, counts, seconds) / (1 + accepted)
        depth = int(token_s.argmin())
        return depth + 1 if token_s[depth] < GAIN * plain_s else 0


class DraftDepth:
    """One engine's experience."""

    def __init__(self, most: int) -> None:
        """`most`: the deepest drafts, 1 or more."""
        self._most = most
        self._places = _Places(most)
        self._retries = _Retries()
        self._widths: dict[int, _Width] = {}

    def next(self, responses: int) -> tuple[int, int]:
        """Most drafts of a response in the next pass over so many; and for how many more passes over about as many
        that stands, without any need to see them."""
        if not self._places.useless:
            self._retries.reset()
            return self._of(responses).next()
        if self._retries.goes_on() or self._retries.is_due():
            return self._most, 0
        self._retries.rest(RESTED)
        return 0, RESTED

    def saw(self, responses: int, seconds: float, limit: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """The outcome of a pass over these responses alone: no prompt was computed in it.

        `limit`: the most drafts that each could have. `drafted`, `accepted` [places]: how many had one at each place,
        and how many of these were accepted.
        """
        if limit:
            self._places.saw(responses, limit, drafted, accepted)
            self._retries.done()
        self._of(responses).saw(responses, seconds, limit, sum(drafted))

    def _of(self, responses: int) -> _Width:
        width = responses.bit_length()
        if width not in self._widths:
            self._widths[width] = _Width(self._most, self._places)
        return self._widths[width]
