"""How long each actor will still work, and when it ends, from quantiles of what its samples have still to draw. Pure.

Of an actor's samples, S(k) are expected to be alive after k more iterations, with a context of C(k) tokens. Both are
sums over samples, so the outlook of two actors whose samples are put together is the sum of theirs: a migration is
judged by adding two rows. From them

    an iteration           a(max(S, 1)) + g C / min(S, 1), stretched by the actor's measured pace
    any sample is alive    1 - exp(-S): the number alive is taken to be Poisson, which it is where it matters, late
    expected work          sum of iterations x that chance
    end at a confidence p  after the k iterations with exp(-S(k)) = p

An iteration of more samples than the engine runs at once is stretched by how many times they are too many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.scaling.plan import DeviceOption
from rlhfless.scaling.policies.forecasters import Ahead, Floats
from rlhfless.scaling.policy import Ints, StepView

GRID_STEP = 1.25
"""Each point of the grid of iterations lies so many times as far ahead as the one before."""

_EDGES = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.9995, 1.0])
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


@dataclass(frozen=True, slots=True)
class Alive:
    """What is expected to be alive at each place."""

    grid: Floats  # [T]
    sequences: Floats  # [places, T]
    context_tokens: Floats  # [places, T]


def alive(
    ahead: Ahead, home: Ints, context_tokens: Ints, places: int, grid: Floats, counts: Ints | None = None
) -> Alive:
    """Each [rows of ahead]: `home` is the place of a sample, `context_tokens` what it has with its prompt, and `counts`
    how many alike it stands for."""
    single = ahead.levels.size == 1
    left = ahead.remaining_tokens if single else ahead.at(RANKS)
    weights = np.ones((1, 1)) if single else WEIGHTS[None, :]
    weights = np.broadcast_to(weights, left.shape) if counts is None else weights * counts[:, None]
    cells = np.searchsorted(grid, left)
    np.minimum(cells, grid.size - 1, out=cells)
    cells += (home * grid.size)[:, None]
    shape = (places, grid.size)

    def beyond(weight: Floats) -> Floats:
        """Sums of all that ends after each point."""
        ends = np.bincount(cells.ravel(), weight.ravel(), minlength=places * grid.size).reshape(shape)
        return np.asarray(ends[:, ::-1].cumsum(axis=1)[:, ::-1] - ends)

    sequences = beyond(weights)
    return Alive(grid, sequences, beyond(context_tokens[:, None] * weights) + sequences * grid)


def alive_at_begin(ahead: Ahead, view: StepView, home: Ints, grid: Floats) -> Alive:
    """The outlook of a step that begins, in which all samples of a prompt at one place are alike."""
    places = len(view.places)
    if ahead.levels.size == 1:
        return alive(ahead, home, view.prompt_tokens[view.group], places, grid)
    pairs, first, counts = np.unique(view.group * places + home, return_index=True, return_counts=True)
    some = Ahead(first, ahead.levels, ahead.remaining_tokens[first])
    return alive(some, pairs % places, view.prompt_tokens[view.group[first]], places, grid, counts)


def longest(ahead: Ahead, samples: Ints, sizes: Ints, confidence: float) -> Floats:
    """[rows]: what all samples of a group end by with this probability, if the group ends at a row of a list and takes
    `sizes` [rows] of its samples from there backwards. `samples` [rows] are rows of `ahead`, in the order of the list.
    """
    left = ahead.at(RANKS)[samples]
    grid = grid_to(float(left.max()))
    cells = np.searchsorted(grid, left) + (np.arange(len(left)) * grid.size)[:, None]
    weights = np.broadcast_to(WEIGHTS, left.shape).ravel()
    ends = np.bincount(cells.ravel(), weights, minlength=len(left) * grid.size).reshape(len(left), grid.size)
    alive = np.concatenate([np.zeros((1, grid.size)), (ends[:, ::-1].cumsum(axis=1)[:, ::-1] - ends).cumsum(axis=0)])
    rows = np.arange(1, len(left) + 1)
    within = alive[rows] - alive[np.maximum(rows - sizes, 0)]
    return np.maximum.accumulate(_crossing(within, np.broadcast_to(grid, within.shape), -math.log(confidence)))


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

    def spans_s(self, places: Ints, state: tuple[Floats, Floats], grid: Floats) -> tuple[Floats, Floats]:
        """Seconds [rows, T - 1] between the points of the grid while anybody is alive, and the mean number alive
        there; `state` holds sequences and context [rows, T] of actors at `places` [rows]."""
        sequences, context = (np.asarray((column[:, 1:] + column[:, :-1]) / 2) for column in state)
        most = self.most[places][:, None]
        batch = np.clip(sequences, 1.0, most)
        iteration_s = np.empty_like(batch)
        for number, device in enumerate(self._kinds):
            rows = self._kind[places] == number
            if rows.any():
                iteration_s[rows] = device.curve.iteration_s(np.minimum(batch[rows], device.curve.knots[-1]))
        iteration_s += self._context_s[places][:, None] * context * np.minimum(batch / np.maximum(sequences, 1e-9), 1e3)
        waves = np.maximum(sequences / most, 1.0)
        return iteration_s * waves * self._pace[places][:, None] * np.diff(grid), sequences


def work_s(spans: tuple[Floats, Floats]) -> Floats:
    """[rows]: expected seconds of work."""
    seconds, sequences = spans
    return np.asarray((seconds * -np.expm1(-sequences)).sum(axis=1))


def end_s(spans: tuple[Floats, Floats], sequences: Floats, confidence: float) -> Floats:
    """[rows]: seconds until the last sample has ended, with this probability; `sequences` [rows, T] are those alive."""
    total = np.concatenate([np.zeros((len(sequences), 1)), spans[0].cumsum(axis=1)], axis=1)
    return _crossing(sequences, total, -math.log(confidence))


def _crossing(falling: Floats, at: Floats, limit: float) -> Floats:
    """[rows]: where rows that fall to 0 come below the limit, between the points `at` [rows, T]; 0 if they start so."""
    over = falling > limit
    last = np.where(over[:, 0], over.shape[1] - 1 - over[:, ::-1].argmax(axis=1), 0)
    after = np.minimum(last + 1, over.shape[1] - 1)
    rows = np.arange(len(falling))
    high, low = falling[rows, last], falling[rows, after]
    share = np.clip((high - limit) / np.maximum(high - low, 1e-12), 0.0, 1.0)
    return np.where(over[:, 0], at[rows, last] + share * (at[rows, after] - at[rows, last]), 0.0)
