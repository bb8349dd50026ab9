"""Drafts of a response from its prompt, its own earlier part, and other responses to the same prompt.

A draft is what followed the longest equal end elsewhere; where several places are equally long, what most of them have
next, for as far as they agree with each other (suffix decoding, Oliaro et al., arXiv 2411.04975, does the same on a
tree). Responses are remembered in the order in which they came, and the newest places of an end count: what older
weights drew fades as newer weights draw otherwise. Pure: a wrong draft costs time, and changes no sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

ORDER = 3
"""Tokens that must be equal at least. Two are equal by chance too often; more miss the beginning of what repeats."""

MOST_PLACES = 8
"""Places of an end that are remembered, the newest ones."""

LONGEST = 32
"""Longer equal ends do not tell more."""

MOST_RESPONSES = 256
"""Responses of a prompt that are remembered."""

TOKEN_BITS = 21
"""Of a token in the key of an end: vocabularies have fewer than two million."""

PLACE_BITS = 32
"""Of the end's position in a place, below the number of the sequence."""


class PromptSuffixes:
    """A prompt and the responses to it, running ones included: all ends of ORDER tokens, with the places where they
    are. Ends and places are numbers: Python's garbage collector walks through everything else again and again, which
    takes more time than the drafts."""

    def __init__(self, prompt: Sequence[int]) -> None:
        """`prompt` [tokens]: the end of it is the end of a response without tokens."""
        self._prompt = list(prompt)
        self._begin = self._prompt[-ORDER:]
        self._clear()

    def add(self, name: Hashable, tokens: Iterable[int]) -> None:
        """More tokens of the response `name`, a new one or one that is there. Their ends are looked at by the next
        `draft`: while nothing is drafted, they cost nothing."""
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
        """Tokens of a response; 0 if it is not there."""
        number = self._responses.get(name)
        return 0 if number is None else len(self._sequences[number]) - len(self._begin)

    def draft(self, name: Hashable, depth: int) -> list[int]:
        """At most `depth` tokens that may come next in the response `name`; none if its end is nowhere else."""
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
        """Nothing but the prompt is there."""
        self._sequences = [self._prompt]
        self._responses: dict[Hashable, int] = {}
        """The number of each response among the sequences."""
        self._places: dict[int, int | tuple[int, ...]] = {}
        """By the key of an end: its place, or the newest of several, ascending."""
        self.tokens = len(self._prompt)
        self._new = [(0, range(ORDER, len(self._prompt)))]
        """Sequences with their ends that are not in `_places` yet."""

    def _mark(self) -> None:
        """Find the places of all ends that are new, in the order in which they came."""
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
    """The ORDER tokens before `end` as one number."""
    return (tokens[end - 3] << TOKEN_BITS | tokens[end - 2]) << TOKEN_BITS | tokens[end - 1]


def _equal(own: Sequence[int], other: Sequence[int], end: int) -> int:
    """How many tokens before `end` in `other` are the last ones of `own`, up to LONGEST."""
    length = ORDER
    while length < min(LONGEST, len(own), end) and own[-1 - length] == other[end - 1 - length]:
        length += 1
    return length


class Pace:
    """How many drafts a response gets: twice as many after a pass that took all, as many as were taken after another
    one, and none for a while after passes that took none, each time for twice as long."""

    __slots__ = ("_length", "_misses", "_most", "_pause")

    def __init__(self, most: int) -> None:
        self._most = self._length = most
        self._misses = self._pause = 0

    def saw(self, drafted: int, taken: int) -> None:
        """The outcome of a pass."""
        if taken == drafted:
            self._length = min(2 * self._length, self._most)
        else:
            self._length = max(taken, 1)
        self._misses = 0 if taken else self._misses + 1
        self._pause = 0 if taken else 2**self._misses

    def next(self) -> int:
        """Drafts in the next pass."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._length
