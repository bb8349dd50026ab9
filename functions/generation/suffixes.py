"""Drafts of a response from its prompt, its own earlier part, and other responses to the same prompt.

A draft is what followed the longest equal end elsewhere; where several places are equally long, what most of them have
next, for as far as they agree with each other (suffix decoding, Oliaro et al., arXiv 2411.04975, does the same on a
tree). Responses are remembered in the order in which they came, and the newest places of an end count: what older
weights drew fades as newer weights draw otherwise. Pure: a wrong draft costs time, and changes no sample.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence

ORDER = 3
"""Tokens that must be equal at least. Two are equal by chance too often; more miss the beginning of what repeats."""

MOST_PLACES = 8
"""Places of an end that are remembered, the newest ones."""

LONGEST = 32
"""Longer equal ends do not tell more."""

MOST_RESPONSES = 256
"""Responses of a prompt that are remembered."""


class PromptSuffixes:
    """A prompt and the responses to it, running ones included: all ends of ORDER tokens, with the places where they
    are."""

    def __init__(self, prompt: Sequence[int]) -> None:
        """`prompt` [tokens]: the end of it is the end of a response without tokens."""
        self._prompt = list(prompt)
        self._begin = self._prompt[-ORDER:]
        self._responses: dict[Hashable, list[int]] = {}
        self._places: dict[tuple[int, ...], deque[tuple[list[int], int]]] = {}
        self._new: list[tuple[list[int], range]] = []
        """Sequences with their ends that are not in `_places` yet."""
        self.tokens = 0
        self._add_prompt()

    def add(self, name: Hashable, tokens: Iterable[int]) -> None:
        """More tokens of the response `name`, a new one or one that is there. Their ends are looked at by the next
        `draft`: while nothing is drafted, they cost nothing."""
        response = self._responses.get(name)
        first = 0 if response is None else len(response) + 1
        if response is None:
            self._fade()
            response = self._responses[name] = list(self._begin)
        self.tokens -= len(response)
        response.extend(tokens)
        self.tokens += len(response)
        self._new.append((response, range(max(first, ORDER), len(response) + 1)))

    def length(self, name: Hashable) -> int:
        """Tokens of a response; 0 if it is not there."""
        return max(len(self._responses.get(name, ())) - len(self._begin), 0)

    def draft(self, name: Hashable, depth: int) -> list[int]:
        """At most `depth` tokens that may come next in the response `name`; none if its end is nowhere else."""
        self._mark()
        own = self._responses[name]
        places = [
            (response, place)
            for response, place in reversed(self._places.get(tuple(own[-ORDER:]), ()))
            if place < len(response)
        ]
        equal = [_equal(own, response, place) for response, place in places]
        places = [each for each, length in zip(places, equal, strict=True) if length == max(equal)]
        draft: list[int] = []
        while places and len(draft) < depth:
            (token, _count), *_ = Counter(response[place] for response, place in places).most_common(1)
            draft.append(token)
            places = [(r, place + 1) for r, place in places if r[place] == token and place + 1 < len(r)]
        return draft

    def _add_prompt(self) -> None:
        self.tokens = len(self._prompt)
        self._new = [(self._prompt, range(ORDER, len(self._prompt)))]

    def _mark(self) -> None:
        """Find the places of all ends that are new, in the order in which they came."""
        for tokens, ends in self._new:
            for end in ends:
                key = tuple(tokens[end - ORDER : end])
                if key not in self._places:
                    self._places[key] = deque(maxlen=MOST_PLACES)
                self._places[key].append((tokens, end))
        self._new.clear()

    def _fade(self) -> None:
        """Forget the older half of too many responses."""
        if len(self._responses) < MOST_RESPONSES:
            return
        kept = list(self._responses.items())[MOST_RESPONSES // 2 :]
        self._responses, self._places = {}, {}
        self._add_prompt()
        for name, response in kept:
            self.add(name, response[len(self._begin) :])


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
