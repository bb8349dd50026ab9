"""Draft a response from its prompt, its own earlier part, and other responses to the same prompt.

A draft is the continuation of the longest matching suffix elsewhere; among equally long matches, the most frequent
next token wins, for as long as the matches agree (suffix decoding, Oliaro et al., arXiv 2411.04975, does the same on
a tree). Responses are remembered in order of arrival, and the newest places of a suffix count, so output of older
weights fades as newer weights diverge. Pure: a wrong draft costs time but changes no sample.

How deep to draft is chosen from measured seconds per token by batch size and depth. A pass over drafts takes longer
than a plain pass and yields more tokens. The cost of a draft depends on the batch size, so each doubling of it has its
own row. A row measures every depth a few times, then uses the depth with the fewest seconds per token, and re-measures
another depth at growing intervals.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence

ORDER = 3
"""Fewest tokens that must match. Two match by chance too often; more miss the start of a repetition."""

MOST_PLACES = 8
"""Remembered places per suffix, newest first."""

LONGEST = 32
"""Longer matches add no information."""

MOST_RESPONSES = 256
"""Remembered responses per prompt."""

TOKEN_BITS = 21
"""Bits per token in the key of a suffix: vocabularies have fewer than two million tokens."""

PLACE_BITS = 32
"""Bits of the suffix's position in a place, below the sequence number."""


class PromptSuffixes:
    """A prompt and its responses, including running ones: all suffixes of ORDER tokens, with their places.

    Suffixes and places are plain integers: Python's garbage collector repeatedly walks all other objects, which
    takes longer than the drafts.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        """`prompt` [tokens]: its end is also the end of an empty response."""
        self._prompt = list(prompt)
        self._begin = self._prompt[-ORDER:]
        self._clear()

    def add(self, name: Hashable, tokens: Iterable[int]) -> None:
        """Add tokens to the response `name`, which may be new.

        Their suffixes are indexed lazily by the next `draft`, so they cost nothing while nothing is drafted.
        """
        number = self._responses.get(name)
        first = 0 if number is None else len(self._sequences[number]) + 1
        if number is None:
            self._fade()
            number = self._responses[name] = len(self._sequences)
            self._sequences.append(list(self._begin))
        response = self._sequences[number]
        before = len(response)
        response.extend(tokens)
        self.tokens += len(response) - before
        self._new.append((number, range(max(first, ORDER), len(response) + 1)))

    def length(self, name: Hashable) -> int:
        """Return the tokens of a response; 0 if unknown."""
        number = self._responses.get(name)
        return 0 if number is None else len(self._sequences[number]) - len(self._begin)

    def draft(self, name: Hashable, depth: int) -> list[int]:
        """Return up to `depth` tokens that may come next in the response `name`; none if its suffix is unique."""
        self._mark()
        own = self._sequences[self._responses[name]]
        found = self._places.get(_key(own, len(own)), ()) if len(own) >= ORDER else ()
        known = (found,) if isinstance(found, int) else found
        at = [(self._sequences[place >> PLACE_BITS], place & (1 << PLACE_BITS) - 1) for place in reversed(known)]
        places = [(response, place) for response, place in at if place < len(response)]
        equal = [_equal(own, response, place) for response, place in places]
        places = [each for each, length in zip(places, equal, strict=True) if length == max(equal)]
        draft: list[int] = []
        while places and len(draft) < depth:
            (token, _count), *_ = Counter(response[place] for response, place in places).most_common(1)
            draft.append(token)
            places = [(r, place + 1) for r, place in places if r[place] == token and place + 1 < len(r)]
        return draft

    def _clear(self) -> None:
        """Forget everything but the prompt."""
        self._sequences = [self._prompt]
        self._responses: dict[Hashable, int] = {}
        """The sequence number of each response."""
        self._places: dict[int, int | tuple[int, ...]] = {}
        """By suffix key: its place, or the newest of several, ascending."""
        self.tokens = len(self._prompt)
        self._new = [(0, range(ORDER, len(self._prompt)))]
        """Sequences with their suffixes that are not in `_places` yet."""

    def _mark(self) -> None:
        """Index all new suffixes, in order of arrival."""
        for number, ends in self._new:
            tokens = self._sequences[number]
            for end in ends:
                key, place = _key(tokens, end), number << PLACE_BITS | end
                known = self._places.get(key)
                if known is None:
                    self._places[key] = place
                else:
                    earlier = (known,) if isinstance(known, int) else known
                    self._places[key] = (*earlier[1 - MOST_PLACES :], place)
        self._new.clear()

    def _fade(self) -> None:
        """Forget the older half of too many responses."""
        if len(self._responses) < MOST_RESPONSES:
            return
        kept = [(name, self._sequences[n]) for name, n in self._responses.items()][MOST_RESPONSES // 2 :]
        self._clear()
        for name, response in kept:
            self.add(name, response[len(self._begin) :])


def _key(tokens: Sequence[int], end: int) -> int:
    """Encode the ORDER tokens before `end` as one integer."""
    return (tokens[end - 3] << TOKEN_BITS | tokens[end - 2]) << TOKEN_BITS | tokens[end - 1]


def _equal(own: Sequence[int], other: Sequence[int], end: int) -> int:
    """Return how many tokens before `end` in `other` match the last ones of `own`, up to LONGEST."""
    length = ORDER
    while length < min(LONGEST, len(own), end) and own[-1 - length] == other[end - 1 - length]:
        length += 1
    return length


class Pace:
    """The draft length of a response: doubled after a pass that accepted all drafts, else the number accepted.

    After passes that accepted none it pauses, each time twice as long.
    """

    __slots__ = ("_length", "_misses", "_most", "_pause")

    def __init__(self, most: int) -> None:
        self._most = self._length = most
        self._misses = self._pause = 0

    def saw(self, drafted: int, taken: int) -> None:
        """Record the outcome of a pass."""
        if taken == drafted:
            self._length = min(2 * self._length, self._most)
        else:
            self._length = max(taken, 1)
        self._misses = 0 if taken else self._misses + 1
        self._pause = 0 if taken else 2**self._misses

    def next(self) -> int:
        """Return the draft length of the next pass."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._length


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
