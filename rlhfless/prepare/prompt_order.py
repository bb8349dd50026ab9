"""The order of a run's training prompts. The batch of a step is a function of prompts, weights, seed and step alone.

From a mixture, each step takes the whole part of prompts_per_step times each set's weight; the rest goes to the sets
furthest below their weight so far. Within a set the order is that of a run with this set alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice

import numpy as np

from rlhfless.records import IntArray, Prompt
from rlhfless.spec import DataSpec
from rlhfless.spec.errors import InputError, Problem

OTHERS = 1
"""Seed that makes the order of `PromptOrder.others` differ from any epoch's."""


class PromptOrder:
    """The prompts of each step.

    Shuffled: each epoch has its own order. A batch never crosses epochs, so no prompt is in it twice; fewer than n left
    at an epoch's end are skipped. Not shuffled: file order, repeated.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._draw)

    def __len__(self) -> int:
        return len(self._prompts)

    def batch(self, step: int, n: int) -> list[Prompt]:
        """Return the n prompts of a step, counted from 0. Raises ValueError if there are fewer than n."""
        total = len(self._prompts)
        if not 1 <= n <= total or step < 0:
            raise ValueError(f"no batch of {n} for step {step}: there are {total} prompts")
        if not self._shuffle:
            return [self._prompts[(step * n + i) % total] for i in range(n)]
        epoch, position = divmod(step, total // n)
        chosen = self._order(epoch)[position * n : (position + 1) * n]
        return [self._prompts[i] for i in chosen]

    def prompt(self, prompt_id: str) -> Prompt:
        """Return the prompt with an id. Raises InputError if the data lacks it."""
        if prompt_id not in self._by_id:
            what = f"the run has started to generate responses to prompt {prompt_id!r}, which the data no longer has"
            raise InputError("prompts", [Problem("prompts", what, "put it back, or start a new run")])
        return self._by_id[prompt_id]

    def others(self, step: int, n: int, used: Collection[str]) -> list[Prompt]:
        """Return up to n prompts for a step whose ids are not `used`, in an order of that step."""
        order = np.random.default_rng([self._seed % 2**64, step, OTHERS]).permutation(len(self._prompts))
        unused = (self._prompts[i] for i in order if self._prompts[i].prompt_id not in used)
        return list(islice(unused, n))

    @cached_property
    def _by_id(self) -> dict[str, Prompt]:
        return {prompt.prompt_id: prompt for prompt in self._prompts}

    def _draw(self, epoch: int) -> IntArray:
        return np.random.default_rng([self._seed % 2**64, epoch]).permutation(len(self._prompts))


@dataclass(frozen=True, slots=True)
class _Place:
    """A step's position in one set."""

    epoch: int
    first: int
    count: int
    given: int
    """Prompts of the set in all steps up to this one."""


def order_of(prompts: Sequence[Prompt], spec: DataSpec, seed: int) -> PromptOrder:
    """Create the order of a run's training prompts."""
    if spec.mixed:
        return MixtureOrder(prompts, spec.weights, seed, spec.shuffle)
    return PromptOrder(prompts, seed, spec.shuffle)


class MixtureOrder(PromptOrder):
    """The prompts of each step of a mixture; see PromptOrder."""

    def __init__(self, prompts: Sequence[Prompt], weights: Mapping[str, float], seed: int, shuffle: bool) -> None:
        """`weights`: by set name (the prompts' `source`); they need not add up to 1."""
        super().__init__(prompts, seed, shuffle)
        self._names = tuple(weights)
        self._sets = [[prompt for prompt in prompts if prompt.source == name] for name in weights]
        self._weights = np.array(list(weights.values())) / sum(weights.values())
        self._places: dict[int, list[list[_Place]]] = {}
        """By prompts per step, the places of the steps from 0 on, as far as they were asked for."""
        self._set_order = lru_cache(maxsize=2 * len(self._sets))(self._draw_set)

    def batch(self, step: int, n: int) -> list[Prompt]:
        """Return the n prompts of a step, counted from 0. Raises ValueError if a set has fewer than its share."""
        if n < 1 or step < 0:
            raise ValueError(f"no batch of {n} for step {step}")
        places = self._places.setdefault(n, [])
        while len(places) <= step:
            places.append(self._next(places, n))
        return [prompt for number, place in enumerate(places[step]) for prompt in self._of_set(number, place)]

    def others(self, step: int, n: int, used: Collection[str]) -> list[Prompt]:
        """See PromptOrder. Sets appear by weight (Efraimidis and Spirakis 2006: order of exponential times divided by
        weight)."""
        sets = zip(self._names, self._weights, self._sets, strict=True)
        each = {name: weight / len(prompts) for name, weight, prompts in sets}
        times = np.random.default_rng([self._seed % 2**64, step, OTHERS]).exponential(size=len(self._prompts))
        order = np.argsort(times / np.array([each[prompt.source] for prompt in self._prompts]), kind="stable")
        unused = [self._prompts[i] for i in order if self._prompts[i].prompt_id not in used]
        return unused[:n]

    def _next(self, places: Sequence[Sequence[_Place]], n: int) -> list[_Place]:
        """Return the places of the next step."""
        before = places[-1] if places else [_Place(0, 0, 0, 0)] * len(self._sets)
        given = np.array([place.given for place in before])
        counts = np.floor(n * self._weights).astype(int)
        lacking = n * (len(places) + 1) * self._weights - given - counts
        counts[np.argsort(-lacking, kind="stable")[: n - counts.sum()]] += 1
        return [self._after(number, place, int(counts[number])) for number, place in enumerate(before)]

    def _after(self, number: int, before: _Place, count: int) -> _Place:
        total, first, given = len(self._sets[number]), before.first + before.count, before.given + count
        if count > total:
            raise ValueError(f"no {count} prompts of a set for a step: it has {total}")
        if first + count > total:
            return _Place(before.epoch + 1, 0, count, given)
        return _Place(before.epoch, first, count, given)

    def _of_set(self, number: int, place: _Place) -> list[Prompt]:
        order = self._set_order(number, place.epoch)
        return [self._sets[number][i] for i in order[place.first : place.first + place.count]]

    def _draw_set(self, number: int, epoch: int) -> IntArray:
        total = len(self._sets[number])
        if not self._shuffle:
            return np.arange(total)
        return np.random.default_rng([self._seed % 2**64, epoch, number, OTHERS]).permutation(total)
