"""The completion model: the remaining work and the end of each actor, from quantiles of the remaining tokens of its
samples. Pure.

Of an actor's samples, S(k) are expected to be alive after k more iterations, with a context of C(k) tokens, and all
have ended with probability exp(-N(k)). All three are sums over samples (`counting.count_alive`), so to put the samples
of two actors together is to add their rows: migrations are judged by that. The work of an actor and the time of its end
follow from them (`kernel.trial`).

The rest of a sample is counted in tokens; its wait for admission in iterations (`queue_iterations`). In the batch it
draws one token per iteration, so it ends after the iterations of its wait plus its remaining tokens. While it waits it
is alive, but not in the batch: it holds no context. The length of the longest response of the step does not depend on
waits (`longest_response`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.scaling.lengths.forecast import runs
from rlhfless.scaling.plan import DeviceOption
from rlhfless.scaling.policies.cost_aware import counting
from rlhfless.scaling.policies.cost_aware.counting import ENDED, Counted, Ranks
from rlhfless.scaling.policies.cost_aware.forecasters import Floats, RemainingLengths
from rlhfless.scaling.policies.cost_aware.kernel import Speeds
from rlhfless.scaling.policy import Flags, Ints, StepView

GRID_STEP = 1.25
"""Ratio of two successive points of the grid of iterations."""

_EDGES = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.9995, 0.9999, 1.0])
RANKS: Floats = (_EDGES[1:] + _EDGES[:-1]) / 2
"""The ranks at which a sample's distribution is evaluated. They are dense near 1: long samples decide when an actor
ends."""
WEIGHTS: Floats = np.diff(_EDGES)


FINEST = 128
"""If samples wait, points of the grid are at least the length of the grid divided by this apart."""


def grid_to(most: float, apart: float = math.inf) -> Floats:
    """Points in iterations (or tokens) from now: 0, 4, 8, 12 and then ever further apart, by `apart` at most, up to
    `most`."""
    points, at = [0.0, 4.0, 8.0], 12.0
    while at < most:
        points.append(at)
        at = min(math.ceil(at * GRID_STEP), at + apart)
    return np.array([*points, max(most, 12.0)])


FEW = 16
"""If an actor has at most this many samples, each counts separately in the probability that any is alive."""

AROUND = 64
"""This many neighbours in a sorted list count as alike."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The samples that are expected to be alive at each slot."""

    grid: Floats  # [T], iterations
    columns: Floats
    """[3, slots, T]: sequences, tokens of context of the sequences in the batch, and -log of the probability that all
    have ended."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The unfinished samples of a step, or some of them."""

    lengths: RemainingLengths
    home: Ints
    """[rows]: the slot of each."""
    context: Ints
    """[rows]: tokens of its prompt and the tokens drawn."""
    begun: Flags
    """[rows]: whether it has drawn a token."""

    def of(self, some: Ints) -> Unfinished:
        """Some of the rows."""
        return Unfinished(self.lengths.of(some), self.home[some], self.context[some], self.begun[some])


def unfinished_of(lengths: RemainingLengths, view: StepView, home: Ints) -> Unfinished:
    """The unfinished samples of a step; `home` [rows] is the slot of each."""
    samples = lengths.samples
    context = view.tokens[samples] + view.prompt_tokens[view.group[samples]]
    return Unfinished(lengths, home, context, view.tokens[samples] > 0)


def ranks_of(lengths: RemainingLengths) -> Ranks:
    """The positions of `RANKS` among the levels of a forecast; a known length is its only level."""
    if lengths.known:
        return Ranks(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1), np.ones(1))
    return Ranks(*lengths.between(RANKS), WEIGHTS)


def queue_iterations(rows: Unfinished, most: Ints, count: Ints) -> Floats:
    """[rows]: iterations until a sample that waits is admitted; 0 for samples that an engine runs at once: `most` of
    the `count` at each slot [slots]. Samples are assumed to wait from long to short. The next sample is admitted when
    the running sequences together have done the work of all samples before it, except half of the running samples'
    work."""
    delay = np.zeros(rows.home.size)
    if (count > most).any():
        lengths = rows.lengths
        _, first = runs(lengths.kind)
        means = lengths.kind_means[lengths.kind[first]]
        longest = np.argsort(-means, kind="stable")
        scratch = np.zeros(most.size, np.int64), np.zeros(most.size)
        first = np.append(first, lengths.kind.size)
        counting.add_waits(rows.home, rows.begun, most, means, longest, first, *scratch, delay)
    return delay


def alive(rows: Unfinished, slots: int, most: Ints, few: Flags | None = None, grid: Floats | None = None) -> Alive:
    """The samples expected to be alive at all slots. `most` [slots] is how many sequences an engine there runs at once,
    `few` [slots] whether each of its samples counts separately (see `FEW`). Without a `grid` a long enough one is
    made."""
    lengths, count = rows.lengths, np.bincount(rows.home, minlength=slots)
    delay = queue_iterations(rows, most, count)
    if grid is None:
        most_iterations = float((lengths.table[:, -1][lengths.kind] + delay).max())
        # Samples are admitted at an even pace, so the grid has a point for each half of a mean response up to its end.
        apart = max(float(lengths.means.mean()) / 2, most_iterations / FINEST) if delay.any() else math.inf
        grid = grid_to(most_iterations, apart)
    columns = np.zeros((3, slots, grid.size))
    counted = Counted(rows.home, lengths.kind, rows.context, delay)
    few = count <= FEW if few is None else few
    waiting = np.zeros((2, slots, grid.size))
    counting.count_alive(counted, lengths.table, ranks_of(lengths), few, grid, np.zeros(grid.size), waiting, columns)
    return Alive(grid, columns)


def longest_response(rows: Unfinished, slots: int) -> tuple[Floats, Floats]:
    """[T] and [T]: tokens, and -log of the probability that no sample has more tokens left."""
    count = np.bincount(rows.home, minlength=slots)
    living = alive(rows, slots, most=count)  # if each sample is admitted at once, iterations are tokens
    return living.grid, np.asarray(living.columns[ENDED].sum(axis=0))


def ends_by(lengths: RemainingLengths, samples: Ints, confidence: float) -> Floats:
    """[rows]: the length at which a group that ends at a row of the list has ended, such that with this probability all
    groups of the list have. `samples` [rows] are rows of `lengths`, in the order of the list.

    Each sample may take longer with the same small probability, so a group's length depends on its samples, not on
    their number; and no group is longer than the length at which all samples of the list have ended.
    """
    run, first = runs(lengths.kind[samples])
    counts = np.diff(first, append=samples.size)
    left = lengths.at(RANKS)[lengths.kind[samples[first]]]
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


class EngineTable:
    """The figures of the engines at all slots that the completion model needs."""

    def __init__(self, devices: Sequence[DeviceOption | None]) -> None:
        """`devices`: by slot its kind of device, None for a slot of another function."""
        kinds = list({id(device): device for device in devices if device is not None}.values())
        index = {id(device): number for number, device in enumerate(kinds)}
        curves = [device.curve for device in kinds]
        most_knots = max(len(curve.slopes_s) - 1 for curve in curves)
        knots, bends_s = np.full((len(kinds), most_knots), np.inf), np.zeros((len(kinds), most_knots))
        for row, curve in enumerate(curves):
            inner = slice(len(curve.slopes_s) - 1)
            knots[row, inner], bends_s[row, inner] = curve.knots[1:-1], np.diff(curve.slopes_s)
        self.most = np.array([1 if device is None else device.max_sequences for device in devices])
        self.speeds = Speeds(
            curve=np.array([0 if device is None else index[id(device)] for device in devices]),
            most=self.most,
            context_s=np.array([0.0 if device is None else device.engine.context_s for device in devices]),
            at_zero_s=np.array([curve.at_zero_s for curve in curves]),
            slope_s=np.array([curve.slopes_s[0] for curve in curves]),
            knots=knots,
            bends_s=bends_s,
        )


def _crossing(falling: Floats, at: Floats, limit: float) -> Floats:
    """[rows]: where rows that fall to 0 cross the limit, interpolated between the points `at`; 0 if they start
    below."""
    over = falling > limit
    begins, end = over[:, 0], over.shape[1] - 1
    last = (end - over[:, ::-1].argmax(axis=1)) * begins
    after = np.minimum(last + 1, end)
    rows = np.arange(len(falling))
    high, low = falling[rows, last], falling[rows, after]
    share = np.minimum(np.maximum((high - limit) / np.maximum(high - low, 1e-12), 0.0), 1.0)
    since, until = (at[last], at[after]) if at.ndim == 1 else (at[rows, last], at[rows, after])
    return np.asarray((since + share * (until - since)) * begins)
