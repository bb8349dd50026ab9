"""How long each actor will still work, and when it ends, from quantiles of what its samples have still to draw. Pure.

Of an actor's samples, S(k) are expected to be alive after k more iterations, with a context of C(k) tokens. Both are
sums over samples, so the outlook of two actors whose samples are put together is the sum of theirs: a migration is
judged by adding two rows. From them

    an iteration           a(max(S, 1)) + g C / min(S, 1), stretched by the actor's measured pace
    nobody is alive        exp(-N), with N(k) the sum of -log(1 - s) over samples alive with a chance of s each; of an
                           actor with many samples S(k) is taken for it, which it is where it matters, late
    expected work          sum of iterations x the chance that somebody is alive
    end at a confidence p  after the k iterations with exp(-N(k)) = p

Samples that wait for others to end are alive as well, but not in the batch; what they wait is added to their lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfless.scaling.lengths.forecast import runs
from rlhfless.scaling.plan import DeviceOption
from rlhfless.scaling.policies.forecasters import Ahead, Floats
from rlhfless.scaling.policy import Flags, Ints, StepView

GRID_STEP = 1.25
"""Each point of the grid of iterations lies so many times as far ahead as the one before."""

_EDGES = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.9995, 0.9999, 1.0])
RANKS: Floats = (_EDGES[1:] + _EDGES[:-1]) / 2
"""A sample's distribution as so many lengths, of which the longest are fine: they decide when an actor ends."""
WEIGHTS: Floats = np.diff(_EDGES)


def grid_to(most_tokens: float) -> Floats:
    """Iterations ahead: 0, 4, 8, 12 and then ever further apart, up to `most_tokens`."""
    points, at = [0.0, 4.0, 8.0], 12.0
    while at < most_tokens:
        points.append(at)
        at = math.ceil(at * GRID_STEP)
    return np.array([*points, max(most_tokens, 12.0)])


FEW = 16
"""Of an actor with so many samples or fewer each one counts for itself in whether anybody is alive."""

SURE = 0.999
"""More certain than that of being alive is nobody, so that sums stay finite."""

AROUND = 64
"""So many neighbours in a sorted list are alike."""


@dataclass(frozen=True, slots=True)
class Alive:
    """What is expected to be alive at each place."""

    grid: Floats  # [T]
    sequences: Floats  # [places, T]
    context_tokens: Floats  # [places, T]
    nobody: Floats
    """[places, T]: -log of the probability that all samples there have ended."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The unfinished samples of a step, or some of them."""

    ahead: Ahead
    home: Ints
    """[rows]: the place of each."""
    context: Ints
    """[rows]: what it has drawn, with its prompt."""
    begun: Flags
    """[rows]: whether it has drawn anything."""
    counts: Ints
    """[rows]: how many alike it stands for."""

    def of(self, some: Ints) -> Rows:
        """Some of the rows."""
        return Rows(self.ahead.of(some), self.home[some], self.context[some], self.begun[some], self.counts[some])

    def alike(self) -> Rows:
        """Siblings that follow each other, are at one place and have drawn as much, as one row; unless their lengths
        are known."""
        if self.ahead.known or not self.home.size:
            return self
        _, first = runs(self.ahead.kind, self.home)
        return replace(self.of(first), counts=np.add.reduceat(self.counts, first))


def rows_of(ahead: Ahead, view: StepView, home: Ints) -> Rows:
    """The unfinished samples of a step; `home` [rows] is the place of each."""
    samples = ahead.samples
    context = view.tokens[samples] + view.prompt_tokens[view.group[samples]]
    return Rows(ahead, home, context, view.tokens[samples] > 0, np.ones(samples.size, np.int64))


def queue_tokens(rows: Rows, most: Ints) -> Floats:
    """[rows]: iterations until a sample that waits is admitted; 0 for those that an engine runs at once (`most` by
    place). They are taken to wait from long to short; a slot is free for the next one when the work of all before it
    has been done by all slots, but for the halves of what runs."""
    if (np.bincount(rows.home, rows.counts, minlength=most.size) <= most).all():
        return np.zeros(rows.home.size)
    means = rows.ahead.means
    order = np.lexsort((-means, ~rows.begun, rows.home))
    home, mean, count = rows.home[order], means[order], rows.counts[order]
    places, begins = np.unique(home, return_index=True)
    of = np.searchsorted(places, home)
    ahead, work = np.cumsum(count) - count, np.cumsum(mean * count) - mean * count
    ahead, work = ahead - ahead[begins][of], work - work[begins][of]
    waits = np.maximum(work / most[home] - mean / 2, 0.0) * (ahead + count / 2 > most[home])
    delay = np.empty(order.size)
    delay[order] = waits
    return delay


def alive(rows: Rows, places: int, most: Ints, few: Flags | None = None) -> Alive:
    """What is expected of all places; `most` [places] is how many sequences an engine there runs at once, `few`
    [places] whether each of its samples counts for itself (see `FEW`)."""
    delay = queue_tokens(rows, most)
    left = (rows.ahead.table if rows.ahead.known else rows.ahead.at(RANKS))[rows.ahead.kind] + delay[:, None]
    grid = grid_to(float(left.max()))
    shares = np.broadcast_to(np.ones(1) if rows.ahead.known else WEIGHTS, left.shape)
    cells = np.minimum(np.searchsorted(grid, left), grid.size - 1)
    if few is None:
        few = np.bincount(rows.home, rows.counts, minlength=places) <= FEW

    def beyond(weight: Floats, row: Ints, count: int) -> Floats:
        """`[count, T]`: sums of all that ends after each point, by row."""
        flat = (cells[row >= 0] + (row[row >= 0] * grid.size)[:, None]).ravel()
        ends = np.bincount(flat, weight[row >= 0].ravel(), minlength=count * grid.size).reshape(count, grid.size)
        return np.asarray(ends[:, ::-1].cumsum(axis=1)[:, ::-1] - ends)

    weights = shares * rows.counts[:, None]
    sequences = beyond(weights, rows.home, places)
    context = beyond((rows.context - delay)[:, None] * weights, rows.home, places) + sequences * grid
    chosen = few[rows.home]
    chance = np.clip(beyond(shares, np.where(chosen, np.cumsum(chosen) - 1, -1), int(chosen.sum())), 0.0, SURE)
    nobody = np.where(few[:, None], 0.0, sequences)
    np.add.at(nobody, rows.home[chosen], -np.log1p(-chance) * rows.counts[chosen][:, None])
    return Alive(grid, sequences, np.maximum(context, 0.0), nobody)


def ends_by(ahead: Ahead, samples: Ints, confidence: float) -> Floats:
    """[rows]: by which length a group is over that ends at a row of a list, so that all groups of the list are with
    this probability. `samples` [rows] are rows of `ahead`, in the order of the list.

    Each sample may take longer with the same small probability, so a group's length depends on what is in it, not on
    how many; but none is longer than what all samples of the list together are over by.
    """
    run, first = runs(ahead.kind[samples])
    counts = np.diff(first, append=samples.size)
    left = ahead.at(RANKS)[ahead.kind[samples[first]]]
    grid = grid_to(float(left.max()))
    cells = np.searchsorted(grid, left) + (np.arange(len(left)) * grid.size)[:, None]
    weights = (counts[:, None] * WEIGHTS).ravel()
    ends = np.bincount(cells.ravel(), weights, minlength=len(left) * grid.size).reshape(len(left), grid.size)
    total = np.concatenate([np.zeros((1, grid.size)), (ends[:, ::-1].cumsum(axis=1)[:, ::-1] - ends).cumsum(axis=0)])
    until, allowed = np.append(0, first + counts), -math.log(confidence)
    since = np.minimum(np.searchsorted(until, until[1:] - AROUND), np.arange(first.size))
    around = (total[1:] - total[since]) / (until[1:] - until[since])[:, None]
    alone = _crossing(around, grid, allowed / samples.size)
    together = _crossing(total[-1:], grid, allowed)
    return np.asarray(np.minimum(np.maximum.accumulate(alone), together))[run]


class Engines:
    """The engines at all places, as the outlook needs them."""

    def __init__(self, devices: Sequence[DeviceOption | None], pace: Floats) -> None:
        """By place: its kind (None where nothing is generated), and how much slower than its model it was measured."""
        self._kinds = list({id(device): device for device in devices if device is not None}.values())
        index = {id(device): number for number, device in enumerate(self._kinds)}
        self._kind = np.array([-1 if device is None else index[id(device)] for device in devices])
        self._context_s = np.array([0.0 if device is None else device.engine.context_s for device in devices])
        self.most = np.array([1 if device is None else device.max_sequences for device in devices])
        self.kv_tokens = np.array([0 if device is None else device.kv_capacity_tokens for device in devices])
        self._pace = pace

    def spans_s(self, places: Ints, sequences: Floats, context: Floats, steps: Floats) -> Floats:
        """Seconds [rows, T - 1] between the points of a grid while anybody is alive; `sequences` and `context`
        [rows, T] are those of actors at `places` [rows], `steps` [T - 1] are iterations from point to point."""
        middle = (np.asarray(column[:, 1:] + column[:, :-1]) / 2 for column in (sequences, context))
        return self.iteration_s(places, *middle) * (self._pace[places, None] * steps)

    def iteration_s(self, places: Ints, sequences: Floats, context: Floats) -> Floats:
        """Seconds [rows, points] by which everybody alive comes one token on, by the models; at least one is alive."""
        batch = np.minimum(np.maximum(sequences, 1.0), self.most[places, None])
        if len(self._kinds) == 1:
            iteration_s = self._kinds[0].curve.iteration_s(batch)
        else:
            iteration_s, kind = np.empty_like(batch), self._kind[places]
            for number in np.unique(kind).tolist():
                iteration_s[kind == number] = self._kinds[number].curve.iteration_s(batch[kind == number])
        read = context * np.minimum(batch / np.maximum(sequences, 1e-9), 1e3)
        return np.asarray(iteration_s + self._context_s[places, None] * read)


def work_s(seconds: Floats, nobody: Floats) -> Floats:
    """[rows]: expected seconds of work; `seconds` [rows, T - 1] between the points, `nobody` [rows, T] at them."""
    somebody = -np.expm1(-nobody)
    return np.asarray((seconds * (somebody[:, 1:] + somebody[:, :-1])).sum(axis=1) / 2)


def ends_s(seconds: Floats, nobody: Floats, confidences: Sequence[float]) -> list[Floats]:
    """[rows]: seconds until the last sample has ended, with each of these probabilities."""
    total = _from_zero(seconds)
    return [_crossing(nobody, total, -math.log(confidence)) for confidence in confidences]


def chance(seconds: Floats, nobody: Floats, within_s: Floats) -> Floats:
    """[rows]: the probability that the last sample has ended within so many seconds [rows]."""
    total = _from_zero(seconds)
    left = [float(np.interp(limit_s, *row)) for limit_s, *row in zip(within_s, total, nobody, strict=True)]
    return np.asarray(np.exp(-np.array(left)) * (within_s >= 0))


def _from_zero(seconds: Floats) -> Floats:
    """[rows, T]: sums of spans [rows, T - 1] up to each point."""
    total = np.zeros((seconds.shape[0], seconds.shape[1] + 1))
    seconds.cumsum(axis=1, out=total[:, 1:])
    return total


def _crossing(falling: Floats, at: Floats, limit: float) -> Floats:
    """[rows]: where rows that fall to 0 come below the limit, between the points `at`; 0 if they start so."""
    over = falling > limit
    begins, end = over[:, 0], over.shape[1] - 1
    last = (end - over[:, ::-1].argmax(axis=1)) * begins
    after = np.minimum(last + 1, end)
    rows = np.arange(len(falling))
    high, low = falling[rows, last], falling[rows, after]
    share = np.minimum(np.maximum((high - limit) / np.maximum(high - low, 1e-12), 0.0), 1.0)
    since, until = (at[last], at[after]) if at.ndim == 1 else (at[rows, last], at[rows, after])
    return np.asarray((since + share * (until - since)) * begins)
